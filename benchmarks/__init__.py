"""Speed benchmarks: in most subjects, contestants take turns on the same pinned cores.

Each contestant runs in its own process (`worker`), and `pairs` lets them take turns. A subject is a file with `rows`.
`__main__` runs the subjects and writes a table, a JSON file and a plot of each. The results are ratios, because other
load on the machine slows down both contestants. `results` measures how well configs learn: one file per seed, measured
once.
"""

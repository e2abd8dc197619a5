"""Speed benchmarks: in most subjects, contestants take turns on the same pinned cores.

Each contestant runs in its own process (`worker`), and `pairs` lets the contestants take turns. A subject is a file
with the functions `rows` and `figure`. `__main__` runs the subjects, prints a table of each subject, and writes a JSON
file and a plot. The results are ratios, because other load on the machine slows down both contestants alike. `results`
measures how well configs learn, and stores one file per seed.
"""

"""Speed, side by side: every subject is a pair of contestants that take turns on the same pinned cores.

Each contestant is a process of its own (`worker`), `pairs` lets them take turns, a subject is a file with `rows`, and
`__main__` runs the subjects and writes a table, JSON and a plot of each. Ratios count, not times: what else the machine
does meets both. How well things learn is `results`: one file per seed, measured once.
"""

"""Speed benchmarks: in most subjects, contestants take turns on the same pinned cores.

Each contestant runs in its own process (`worker`), and `pairs` lets the contestants take turns. A subject is a file
with the functions `rows` and `figure`. `__main__` runs the subjects, prints a table of each subject, and writes a JSON
file and a plot. Most results are ratios, because other load on the machine slows down both contestants alike.

Three more benchmarks measure learning instead of speed, and store one file per seed. `results` measures how well
configs learn, `clones` how far reinforcement learning improves a clone of demonstrations, and `stability` how often PPO
collapses.
"""

"""Train and resume runs, write logs and checkpoints, evaluate and export policies, and record videos."""

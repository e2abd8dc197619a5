"""Learning curves of runs and of other libraries: reading, statistics and plots."""

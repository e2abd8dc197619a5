"""Read learning curves of runs and of other libraries, compute statistics over seeds, and plot the curves."""

"""Learning curves, plots and their statistics."""

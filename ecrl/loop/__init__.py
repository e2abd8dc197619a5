"""The training loop: the parts of a run, its state, one iteration, metrics and the finite guard."""

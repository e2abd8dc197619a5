"""Run the training loop: build a run, create its state, run iterations, compute metrics, and detect NaN or infinity."""

"""Run the training loop: build a run, create its state, run iterations, compute metrics, detect NaN and infinity."""

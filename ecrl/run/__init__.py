"""Runs: training, run folders, checkpoints, resuming, logging, evaluation, videos and export."""

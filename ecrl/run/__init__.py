"""A run on disk: training, its folder, checkpoints, resuming, logging, evaluation, video and export."""

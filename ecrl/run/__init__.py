"""Everything that a run needs: training, run folders, checkpoints, resuming, logs, evaluation, videos and export."""

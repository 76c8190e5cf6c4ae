"""The loop behind `anybatch train`: tasks, settings, checkpoints, ranks."""

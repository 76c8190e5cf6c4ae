"""What a run leaves on disk: defined once, written by training, read by the report. Knows nothing of torch."""

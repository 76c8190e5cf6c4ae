"""What a run needs to go on, on disk."""

"""Watching somebody else's loop."""

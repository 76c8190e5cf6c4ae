"""Finished results in, one HTML page out."""

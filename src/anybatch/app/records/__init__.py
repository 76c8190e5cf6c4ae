"""The files of a run: defined once, written by training, read by the report. Does not import torch."""

"""Folder for PYTHONPATH: its `sitecustomize` runs first in every watched process."""

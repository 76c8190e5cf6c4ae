"""The folder that is put on PYTHONPATH: its `sitecustomize` is the first thing that every watched process runs."""

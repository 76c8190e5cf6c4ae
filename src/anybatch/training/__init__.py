"""The experiment behind the command line: tasks, settings, the loop, checkpoints, comparisons, traces.

Nothing is imported here, so that `settings` and `records` can be read without loading torch.
"""

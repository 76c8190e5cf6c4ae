"""The command line: the only package that prints, parses arguments and picks exit codes (0 clean, 1 findings, 2 usage).

No command loads torch before it has printed its first line.
"""

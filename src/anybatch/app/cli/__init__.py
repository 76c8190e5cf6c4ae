"""The command line: the only place that prints, parses arguments and picks exit codes (0 clean, 1 findings, 2 usage).

Nothing is imported here, and no command imports torch before its own first output.
"""

"""The `anybatch` command: training, records, reports, lessons, the self-test and the command line."""

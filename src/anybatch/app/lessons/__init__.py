"""Teaching material: the nine lessons, the trace of one update, and the comparison of ways to train."""

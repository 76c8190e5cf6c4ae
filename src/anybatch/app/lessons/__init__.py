"""What teaches: nine pages to learn from, one update traced, and ways of training compared."""

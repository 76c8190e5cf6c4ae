"""Nine pages that teach: their words, their widgets, how they become one file."""

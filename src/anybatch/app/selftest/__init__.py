"""Checks that `anybatch self-test` runs on somebody's device: exactness, memory, speed, each a check with its number."""

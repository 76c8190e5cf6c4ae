"""The table of exactness: the same cases through the ordinary public API of every contender.

`cases/` says what is to be learnt, `contenders/` how each one is asked to; `witness` records what the optimizer really was
handed, `reference` computes the whole batch in float64, `judge` compares the two. `worker` is one process of one contender,
`collect` starts them all, `pages` and `picture` show what came of it. `python -m benchmarks.exactness` runs it.
"""

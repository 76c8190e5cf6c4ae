"""Rows of different lengths: `Tokens`, the cheapest cut, and sizes tuned while training."""

from anybatch.ragged.cost import Cost
from anybatch.ragged.lengths import RowLengths, narrow, padded_dims
from anybatch.ragged.tokens import Tokens
from anybatch.ragged.tuning import Auto, Choice, Doubling

"""Rows of different lengths: `Tokens`, the cheapest cut, and sizes tuned while training."""

from anybatch.ragged.cost import Cost
from anybatch.ragged.doubling import Doubling
from anybatch.ragged.lengths import RowLengths
from anybatch.ragged.padding import narrow, padded_dims
from anybatch.ragged.tokens import Tokens
from anybatch.ragged.tuning import Auto, Choice

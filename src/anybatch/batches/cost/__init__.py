"""What a micro-batch costs in time, and the cut that costs least."""

from anybatch.batches.cost.cheapest_cut import best_cut
from anybatch.batches.cost.learned_cost import LearnedCost
from anybatch.batches.cost.pass_cost import Cost

__all__ = [
    "Cost",
    "LearnedCost",
    "best_cut",
]

"""The first batch looked at before anything is learnt from it: do the losses of its rows add up?"""

from anybatch.proof.first_look.chosen_rows import by_kind, spread_evenly
from anybatch.proof.first_look.guard import PENDING, FirstLook, look_first, looked_together

__all__ = ["FirstLook", "PENDING", "by_kind", "look_first", "looked_together", "spread_evenly"]

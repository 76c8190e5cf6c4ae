"""How passes become a gradient: three orders, and the choice between them."""

from anybatch.passes.schedules.one_by_one import OneByOne
from anybatch.passes.schedules.schedule_choice import schedule_for

__all__ = ["OneByOne", "schedule_for"]

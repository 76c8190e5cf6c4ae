"""How the passes of a batch become its gradient."""

from anybatch.passes.schedules.one_by_one import OneByOne
from anybatch.passes.schedules.schedule_choice import schedule_for, why_unmeasured

__all__ = ["OneByOne", "schedule_for", "why_unmeasured"]

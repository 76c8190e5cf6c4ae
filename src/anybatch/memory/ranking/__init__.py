"""Which way inside a memory is the fastest: measured passes, and a contest on real updates."""

from anybatch.memory.ranking.rank_ways import Ranking, rank_ways, why_unmeasured
from anybatch.memory.ranking.way_contest import WayContest, fastest_split, may_recompute

__all__ = ["Ranking", "WayContest", "fastest_split", "may_recompute", "rank_ways", "why_unmeasured"]

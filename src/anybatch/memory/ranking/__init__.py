"""Which way inside a memory is the fastest: measured passes, and a contest on real updates."""

from anybatch.memory.ranking.way_contest import WayContest, fastest_own_way, fastest_split, may_recompute
from anybatch.memory.ranking.ways_by_time import Ranking, rank_ways, why_unmeasured

__all__ = ["Ranking", "WayContest", "fastest_own_way", "fastest_split", "may_recompute", "rank_ways", "why_unmeasured"]

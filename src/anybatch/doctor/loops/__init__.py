"""From logs to loops: what was seen, which passes made each update, and what each counted for. No torch here."""

from anybatch.doctor.loops.loop_facts import CRITERIA, Happening, LoopUpdate, LossPass, Lost, Spot, WatchedLoop, spot_of
from anybatch.doctor.loops.loop_windows import SUFFIX, Log, as_hex, from_hex, loop_of, packed, read_logs
from anybatch.doctor.loops.weighing import Lane, Weighing, gradient_error, lanes_of, near, ratio_by_hand, weigh

__all__ = [
    "CRITERIA",
    "Happening",
    "Lane",
    "Log",
    "LoopUpdate",
    "LossPass",
    "Lost",
    "SUFFIX",
    "Spot",
    "WatchedLoop",
    "Weighing",
    "as_hex",
    "from_hex",
    "gradient_error",
    "lanes_of",
    "loop_of",
    "near",
    "packed",
    "ratio_by_hand",
    "read_logs",
    "spot_of",
    "weigh",
]

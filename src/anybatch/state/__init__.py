"""What a forward or a step changes, and putting it back; out of memory; saved tensors kept elsewhere."""

from anybatch.errors import first_line  # until update/ is rebuilt
from anybatch.state.aside import kept
from anybatch.state.disk import Spool
from anybatch.state.draw_finder import DrawFinder
from anybatch.state.offload import Keeper, Offload, check_offload
from anybatch.state.out_of_memory import free_memory, is_out_of_memory, once_more, until_it_fits
from anybatch.state.outer_random import OuterRandom, outer_random
from anybatch.state.per_thread import ThreadState, thread_state
from anybatch.state.replay import Moment, RandomState, Replay, random_state
from anybatch.state.rewind import Rewind
from anybatch.state.running_statistics import copy_statistics, tracking_layers

__all__ = [
    "DrawFinder",
    "Keeper",
    "Moment",
    "Offload",
    "OuterRandom",
    "RandomState",
    "Replay",
    "Rewind",
    "Spool",
    "ThreadState",
    "check_offload",
    "copy_statistics",
    "first_line",
    "free_memory",
    "is_out_of_memory",
    "kept",
    "once_more",
    "outer_random",
    "random_state",
    "thread_state",
    "tracking_layers",
    "until_it_fits",
]

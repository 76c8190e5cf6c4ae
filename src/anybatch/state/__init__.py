"""What a forward or a step changes, and putting it back; out of memory; saved tensors kept elsewhere."""

from anybatch.state.buffers import MovingBuffers
from anybatch.state.disk import TensorFile
from anybatch.state.draw_finder import DrawFinder
from anybatch.state.offload import SavedTensors, check_offload
from anybatch.state.out_of_memory import first_line, free_memory, is_out_of_memory, once_more, until_it_fits
from anybatch.state.per_thread import ThreadState, thread_state
from anybatch.state.random_state import RandomState, random_state
from anybatch.state.snapshot import NOTHING, Snapshot, of_statistics, of_step, tracking_layers

__all__ = [
    "NOTHING",
    "DrawFinder",
    "MovingBuffers",
    "RandomState",
    "SavedTensors",
    "Snapshot",
    "TensorFile",
    "ThreadState",
    "check_offload",
    "first_line",
    "free_memory",
    "is_out_of_memory",
    "of_statistics",
    "of_step",
    "once_more",
    "random_state",
    "thread_state",
    "tracking_layers",
    "until_it_fits",
]

"""What a forward or a step changes, and putting it back; out of memory; saved tensors kept elsewhere."""

from anybatch.state.aside import kept_aside, pieces_of
from anybatch.state.batch_state import BatchState
from anybatch.state.buffers import MovingBuffers
from anybatch.state.disk import TensorFile
from anybatch.state.draw_finder import DrawFinder
from anybatch.state.offload import SavedTensors
from anybatch.state.out_of_memory import free_bytes, free_memory, is_out_of_memory, once_more, until_it_fits
from anybatch.state.per_thread import ThreadState, thread_state
from anybatch.state.python_random import OuterRandom, outer_random
from anybatch.state.snapshot import NOTHING, Held, Slot, Snapshot, of_statistics, of_step, tables_of, tracking_layers
from anybatch.state.torch_random import RandomState, random_state
from anybatch.state.written_inputs import WriteWatch

__all__ = [
    "BatchState",
    "DrawFinder",
    "Held",
    "MovingBuffers",
    "NOTHING",
    "OuterRandom",
    "RandomState",
    "SavedTensors",
    "Slot",
    "Snapshot",
    "TensorFile",
    "ThreadState",
    "WriteWatch",
    "free_bytes",
    "free_memory",
    "is_out_of_memory",
    "kept_aside",
    "of_statistics",
    "of_step",
    "once_more",
    "outer_random",
    "pieces_of",
    "random_state",
    "tables_of",
    "thread_state",
    "tracking_layers",
    "until_it_fits",
]

"""Going back to the start of a batch: random draws and buffers, for nearly nothing as long as nobody goes back."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn.modules.batchnorm import _NormBase

from anybatch.state.aside import kept
from anybatch.state.disk import Spool
from anybatch.state.replay import RandomState, Slot, random_state

Copy = Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class Start:
    """Where generators and buffers stood when a batch began."""

    random: RandomState
    buffers: dict[Slot, tuple[Tensor | None, Copy | None]]
    """The tensor that was in the slot, and what gives a copy of what it held, where one was made."""


class Rewind:
    """Starts of batches of the same modules, taken before each batch and seldom gone back to.

    Buffers are copied before the first batch, to where memory is not short, and from then on only those that were seen to
    change, in place: running statistics and power iterations, but no masks or tables of positions. State that is neither
    a buffer nor torch's random state is out of sight, and so is a write through `.data` that the first batch did not make.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._known: dict[Slot, tuple[Tensor | None, int]] = {}
        self._moving: set[Slot] = set()
        self._first: dict[Slot, Copy] = {}

    def start(self) -> Start:
        """This moment, to go back to."""
        known: dict[Slot, tuple[Tensor | None, int]] = {}
        buffers: dict[Slot, tuple[Tensor | None, Copy | None]] = {}
        spool = None
        for module in (module for top in self._modules for module in top.modules() if module._buffers):
            spool = spool or Spool()
            for name, tensor in module._buffers.items():
                slot = (module, name)
                known[slot] = (tensor, -1 if tensor is None else _version(tensor))
                buffers[slot] = (tensor, None if tensor is None else self._copy(slot, tensor, known[slot][1], spool))
        self._known = known
        return Start(random_state(self._devices()), buffers)

    def go_back(self, start: Start) -> list[str]:
        """Make generators and buffers what they were; the names of buffers that changed for the first time, and stay so."""
        start.random.restore()
        lost = []
        for (module, name), (tensor, copy) in start.buffers.items():
            module._buffers[name] = tensor
            if tensor is not None and copy is not None:
                tensor.data.copy_(copy())
            elif tensor is not None and _version(tensor) != self._known[module, name][1]:
                lost.append(f"{type(module).__name__}.{name}")
        return lost

    def _copy(self, slot: Slot, tensor: Tensor, version: int, spool: Spool) -> Copy | None:
        """A copy of a buffer never seen before, or seen to change, or BatchNorm's, which changes unseen."""
        before, first = self._known.get(slot), self._first.pop(slot, None)
        if before is not None and (before[0] is not tensor or before[1] != version or _differs(tensor, first)):
            self._moving.add(slot)
        if isinstance(slot[0], _NormBase) or slot in self._moving:
            copy = tensor.clone()
            return lambda: copy
        if before is not None:
            return None
        self._first[slot] = kept(tensor.detach(), spool)
        return self._first[slot]

    def _devices(self) -> set[torch.device]:
        if not _has_accelerator():
            return set()
        return {tensor.device for top in self._modules for tensor in (*top.parameters(), *top.buffers())}


@cache
def _has_accelerator() -> bool:
    return torch.accelerator.is_available()


def _differs(tensor: Tensor, first: Copy | None) -> bool:
    """True of a buffer that the first batch changed; also through `.data`, which no version tells of."""
    if first is None or isinstance(tensor, FakeTensor) or tensor.device.type == "meta":
        return False
    return not torch.equal(first().to(tensor.device), tensor)


def _version(tensor: Tensor) -> int:
    """How often the tensor was written to; what was made in inference mode does not count, and cannot be written to."""
    return 0 if tensor.is_inference() else tensor._version

"""Going back to the start of a batch: random draws and buffers, for nearly nothing as long as nobody goes back."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from anybatch.gradients.replay import RandomState, Slot, random_state


@dataclass(frozen=True, slots=True)
class Start:
    """Where generators and buffers stood when a batch began."""

    random: RandomState
    buffers: dict[Slot, tuple[Tensor | None, Tensor | None]]
    """The tensor that was in the slot, and a copy of what it held, where one was made."""


class Rewind:
    """Starts of batches of the same modules, taken before each batch and seldom gone back to.

    Buffers are copied before the first batch, and from then on only those that were seen to change: running statistics and
    power iterations, but no masks or tables of positions. State that is neither a buffer nor torch's random state is out of
    sight.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._known: dict[Slot, tuple[Tensor | None, int]] = {}
        self._moving: set[Slot] = set()

    def start(self) -> Start:
        """This moment, to go back to."""
        known: dict[Slot, tuple[Tensor | None, int]] = {}
        buffers: dict[Slot, tuple[Tensor | None, Tensor | None]] = {}
        for module in (module for top in self._modules for module in top.modules() if module._buffers):
            for name, tensor in module._buffers.items():
                slot = (module, name)
                known[slot] = (tensor, -1 if tensor is None else _version(tensor))
                is_copied = tensor is not None and self._is_moving(slot, known[slot])
                buffers[slot] = (tensor, tensor.clone() if tensor is not None and is_copied else None)
        self._known = known
        return Start(random_state(self._devices()), buffers)

    def go_back(self, start: Start) -> list[str]:
        """Make generators and buffers what they were; the names of buffers that changed for the first time, and stay so."""
        start.random.restore()
        lost = []
        for (module, name), (tensor, copy) in start.buffers.items():
            module._buffers[name] = tensor
            if tensor is not None and copy is not None:
                tensor.data.copy_(copy)
            elif tensor is not None and _version(tensor) != self._known[module, name][1]:
                lost.append(f"{type(module).__name__}.{name}")
        return lost

    def _is_moving(self, slot: Slot, now: tuple[Tensor | None, int]) -> bool:
        """True of a buffer never seen before, or seen to change, or BatchNorm's, which changes unseen."""
        before = self._known.get(slot)
        if before is not None and (before[0] is not now[0] or before[1] != now[1]):
            self._moving.add(slot)
        return before is None or slot in self._moving or isinstance(slot[0], _NormBase)

    def _devices(self) -> set[torch.device]:
        if not torch.accelerator.is_available():
            return set()
        return {tensor.device for top in self._modules for tensor in (*top.parameters(), *top.buffers())}


def _version(tensor: Tensor) -> int:
    """How often the tensor was written to; what was made in inference mode does not count, and cannot be written to."""
    return 0 if tensor.is_inference() else tensor._version

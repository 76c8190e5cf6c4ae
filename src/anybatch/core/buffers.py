"""Snapshots of the same modules, again and again: random draws, and only those buffers that somebody changes."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from anybatch.core.aside import kept_aside
from anybatch.core.disk import TensorFile
from anybatch.core.snapshot import Copy, Held, Slot, Snapshot, in_place
from anybatch.core.torch_private import FakeTensor, NormLayer, buffers_of, num_writes
from anybatch.core.torch_random import has_accelerator, random_state


class MovingBuffers:
    """Takes snapshots of some modules before what may have to run again, and puts them back.

    All buffers are copied for the first snapshot, and from then on only those that were seen to change (running statistics,
    power iterations, moving averages), be it in place or by assignment: no masks, no tables of positions. State that is
    neither a buffer nor torch's random state is out of sight.

    `aside` is for snapshots that are seldom put back, one per batch: the first copies go to where memory is not short, and are
    given up when the second snapshot has been compared with them. Without it they stay, beside the buffers, for as long as this
    object does, so that any earlier snapshot can be put back whole.
    """

    def __init__(self, modules: Sequence[nn.Module], *, aside: bool = False) -> None:
        self._modules = modules
        self._is_aside = aside
        self._known: dict[Slot, tuple[Tensor | None, int]] = {}
        self._moving: set[Slot] = set()
        self._first: dict[Slot, Copy] = {}
        self.num_layouts = 0
        """How often the modules were seen to have other buffers than before; BatchNorm has some, if only empty places."""

    @property
    def num_moving(self) -> int:
        """How many buffers were seen to change, by the last snapshot."""
        return len(self._moving)

    def snapshot(self) -> Snapshot:
        """This moment, to go back to."""
        known: dict[Slot, tuple[Tensor | None, int]] = {}
        buffers: dict[Slot, Held] = {}
        keep = self._keep()
        for slot, tensor in self._slots():
            version = -1 if tensor is None else num_writes(tensor)
            buffers[slot] = (tensor, None if tensor is None else self._copy(slot, tensor, version, keep))
            known[slot] = (tensor, version)
        if known.keys() != self._known.keys():
            self.num_layouts += 1
        self._known = known
        return Snapshot(random=random_state(self._devices()), buffers=buffers)

    def put_back(self, snapshot: Snapshot) -> list[str]:
        """Make generators and buffers what they were; the names of buffers that changed for the first time, and stay so."""
        whole = {slot: self._with_first(slot, held) for slot, held in snapshot.buffers.items()}
        Snapshot(random=snapshot.random, buffers=whole).put_back()
        return [
            f"{type(module).__name__}.{name}"
            for (module, name), (tensor, copy) in whole.items()
            if tensor is not None and copy is None and self._has_moved((module, name), tensor)
        ]

    def moved(self) -> list[Slot]:
        """The buffers that somebody has changed since the last snapshot, or before it, without BatchNorm's and the like."""
        return [
            slot
            for slot, tensor in self._slots()
            if not isinstance(slot[0], NormLayer) and tensor is not None and self._is_other(slot, tensor)
        ]

    def _is_other(self, slot: Slot, tensor: Tensor) -> bool:
        return slot in self._known and (self._has_moved(slot, tensor) or self._differs(self._first.get(slot), tensor))

    def _copy(self, slot: Slot, tensor: Tensor, version: int, keep: Callable[[Tensor], Copy]) -> Copy | None:
        """A copy of a buffer never seen before, or seen to change, or BatchNorm's, which changes unseen."""
        if isinstance(slot[0], NormLayer):
            return in_place(tensor)
        before = self._known.get(slot)
        if before is None:
            self._first[slot] = keep(tensor.detach())
            return self._first[slot]
        if before[0] is not tensor or before[1] != version or self._differs_from_first(slot, tensor):
            self._moving.add(slot)
        return in_place(tensor) if slot in self._moving else None

    def _with_first(self, slot: Slot, held: Held) -> Held:
        """A buffer that did not move until this snapshot, and did later, is as the first copy has it."""
        tensor, copy = held
        if tensor is None or copy is not None or not self._has_moved(slot, tensor):
            return held
        return tensor, self._first.get(slot)

    def _has_moved(self, slot: Slot, tensor: Tensor) -> bool:
        known, version = self._known[slot]
        return slot in self._moving or known is not tensor or version != num_writes(tensor)

    def _differs_from_first(self, slot: Slot, tensor: Tensor) -> bool:
        """True of a buffer that the first batch changed through `.data`, which no version tells of."""
        return self._differs(self._first.pop(slot, None), tensor) if self._is_aside else False

    def _differs(self, first: Copy | None, tensor: Tensor) -> bool:
        if first is None or isinstance(tensor, FakeTensor) or tensor.is_meta:
            return False
        return not torch.equal(first().to(tensor.device), tensor)

    def _keep(self) -> Callable[[Tensor], Copy]:
        if not self._is_aside:
            return in_place
        file = TensorFile()
        return lambda tensor: kept_aside(tensor, file)

    def _slots(self) -> Iterator[tuple[Slot, Tensor | None]]:
        for top in self._modules:
            for module in top.modules():
                for name, tensor in buffers_of(module).items():
                    yield (module, name), tensor

    def _devices(self) -> set[torch.device]:
        if not has_accelerator():
            return set()
        return {tensor.device for top in self._modules for tensor in (*top.parameters(), *top.buffers())}

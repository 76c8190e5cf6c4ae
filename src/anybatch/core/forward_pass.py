"""`ForwardPass`: the only place that calls the model."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from anybatch.core.batch import move
from anybatch.core.events import Load
from anybatch.core.hooks import NOTHING, PassHook, around
from anybatch.core.micro_batches import MicroBatches
from anybatch.core.nesting import Batch, tensors
from anybatch.core.options import Running
from anybatch.core.plan import BatchPlan
from anybatch.core.telling import SILENT, Events


class Ahead:
    """While a micro-batch runs, the next one is on its way, on a stream of its own. Two of them take memory at a time."""

    def __init__(self, cut: MicroBatches, order: Sequence[int], stream: torch.Stream) -> None:
        self._cut = cut
        self._following = dict(pairwise(order))
        self._stream = stream
        self._coming: dict[int, Batch] = {}

    def bring(self, micro_batch: Batch, index: int, device: torch.device) -> Batch:
        there = self._coming.pop(index, None)
        if there is None:
            there = move(micro_batch, device)
        else:
            now = torch.accelerator.current_stream(device)
            now.wait_stream(self._stream)
            for tensor in tensors(there):
                tensor.record_stream(now)  # its memory is the other stream's, which must not use it again before
        following = self._following.get(index)
        if following is not None and all(tensor.is_pinned() for tensor in tensors(self._cut[following])):
            with self._stream:
                self._coming = {following: move(self._cut[following], device)}
        return there


def ahead_of(plan: BatchPlan, device: torch.device | None, running: Running) -> Ahead | None:
    """Prefetch the micro-batches of this batch, if that was asked for; on the CPU there is nothing to send ahead."""
    if not running.prefetch or device is None or device.type == "cpu":
        return None
    return Ahead(plan.cut, plan.micro_batches, _side_stream(device))


@cache
def _side_stream(device: torch.device) -> torch.Stream:
    """One for each device: torch's allocator keeps apart the memory of every stream that it has seen."""
    return torch.Stream(device)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardPass:
    """Brings a micro-batch to the device, and computes something of the model and it: a loss, or representations."""

    model: nn.Module
    compute: Callable[[nn.Module, Batch], Any]
    device: torch.device | None = None
    """Where micro-batches are brought; None where they are there, or parameters are spread over devices."""
    ahead: Ahead | None = None
    autocast: AbstractContextManager[object] = NOTHING
    hooks: tuple[PassHook, ...] = ()
    events: Events = SILENT

    def __call__(self, micro_batch: Batch, index: int = 0) -> Any:
        """Compute on this micro-batch, which is number `index` of its batch."""
        there = self.load(micro_batch, index)
        if not self.hooks and self.autocast is NOTHING and self.events is SILENT:
            return self.compute(self.model, there)
        blocks = around([hook.around_forward(index) for hook in self.hooks])
        with self.events.forward(self.model, index), self.autocast, blocks:
            return self.compute(self.model, there)

    def load(self, micro_batch: Batch, index: int = 0) -> Batch:
        """Bring the micro-batch to the model's device."""
        self.events.begin(Load)
        there = micro_batch
        if self.device is not None:
            there = move(there, self.device) if self.ahead is None else self.ahead.bring(there, index, self.device)
        self.events.end(Load, micro_batch=index, batch=there)
        return there


def is_there(micro_batch: Batch, device: torch.device | None) -> bool:
    """True of a micro-batch that need not be brought to `device`; None is no one device."""
    return device is None or all(tensor.device == device for tensor in tensors(micro_batch))

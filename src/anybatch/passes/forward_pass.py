"""`ForwardPass`: the only place that calls the model."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import nn

from anybatch.batches import Batch, MicroBatches, move, tensors
from anybatch.dropout import UNNUMBERED, Masks, RowNumbering, number_rows
from anybatch.events import SILENT, Events, Load
from anybatch.norms import NO_POWER, PowerSteps
from anybatch.parallel import Ranks
from anybatch.passes.batch_plan import BatchPlan
from anybatch.passes.running import NO_AUTOCAST, Running


class Loading(Protocol):
    """How a micro-batch comes to the device."""

    def bring(self, micro_batch: Batch, index: int, device: torch.device) -> Batch:
        """Micro-batch number `index`, there."""


class WhenNeeded:
    """Each micro-batch is sent when its forward begins."""

    def bring(self, micro_batch: Batch, index: int, device: torch.device) -> Batch:
        return move(micro_batch, device)


NOT_AHEAD = WhenNeeded()


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


def ahead_of(plan: BatchPlan, device: torch.device | None, running: Running) -> Loading:
    """How the micro-batches of this batch come to `device`; on the CPU there is nothing to send ahead."""
    if not running.prefetch or device is None or device.type == "cpu":
        return NOT_AHEAD
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
    ahead: Loading = NOT_AHEAD
    autocast: AbstractContextManager[object] = NO_AUTOCAST
    rows: RowNumbering = UNNUMBERED
    """Which rows of the batch micro-batches hold, where the model's dropout asks."""
    power: PowerSteps = NO_POWER
    """Power iterations, which step in a forward: every micro-batch finds them where the first one did."""
    events: Events = SILENT

    def __call__(self, micro_batch: Batch, index: int = 0) -> Any:
        """What `compute` makes of this micro-batch, which is number `index` of its batch."""
        there = self.load(micro_batch, index)
        self.power.begin()
        with self.events.forward(self.model, index), self.autocast, self.rows.at(index):
            return self.compute(self.model, there)

    def load(self, micro_batch: Batch, index: int = 0) -> Batch:
        """The micro-batch, where the model is."""
        self.events.begin(Load)
        there = micro_batch if self.device is None else self.ahead.bring(micro_batch, index, self.device)
        self.events.end(Load, micro_batch=index, batch=there)
        return there


def is_there(micro_batch: Batch, device: torch.device | None) -> bool:
    """True of a micro-batch that need not be brought to `device`; None is no one device."""
    return device is None or all(tensor.device == device for tensor in tensors(micro_batch))


def rows_of(masks: Iterable[Masks], model: nn.Module, cut: MicroBatches, batch: Batch, ranks: Ranks) -> RowNumbering:
    """Which rows of the batch its micro-batches hold, for dropout that asks: of a model without any, nobody does."""
    rows: RowNumbering = UNNUMBERED
    for each in masks:
        rows = number_rows(each, model, cut, batch, ranks)
    return rows

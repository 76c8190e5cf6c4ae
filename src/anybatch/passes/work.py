"""A batch that is cut and counted, on its way to the model."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from anybatch.batches import Batch, MicroBatches, move
from anybatch.dropout import NumberedRows
from anybatch.events import ForwardBoundary, Load, Loss, Tracker
from anybatch.gradients import Shares
from anybatch.objectives import Metrics, Objective, detached, evaluate, metrics_alone
from anybatch.parallel import ALONE, ONE_PROCESS, Ranks, Turn
from anybatch.passes.agreement import Agreed
from anybatch.passes.barrier import Meeting

Autocast = torch.dtype | torch.autocast | None
"""A dtype to autocast to on the model's device, or an autocast context of the user's own; None for none."""


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Work:
    """A batch that is cut and counted, ready to run."""

    model: nn.Module
    objective: Objective
    cut: MicroBatches
    shares: Shares
    parameters: list[nn.Parameter]
    device: torch.device | None
    """Where micro-batches are brought; None where they are there, or parameters are spread over devices."""
    autocast: AbstractContextManager[object] | None
    tracker: Tracker | None
    turn: Turn = ALONE
    """How the passes of this batch are synchronised over ranks."""
    ranks: Ranks = ONE_PROCESS
    agreed: Agreed | None = None
    """What the ranks told each other of this batch; None in one process."""
    meeting: Meeting = field(default_factory=lambda: Meeting(ONE_PROCESS, is_over=True))
    forget: Callable[[], None] = _nothing
    """What is to be called when the micro-batch that ran last is dropped."""
    rows: NumberedRows | None = None
    """Which rows of the batch micro-batches hold, where the model's dropout asks."""

    @property
    def passes(self) -> list[tuple[int, bool]]:
        """The micro-batches that run, in order, and whether each counts: where all ranks must run as many, some run again."""
        counted = [(index, index < self.shares.num_own) for index in self.shares.running]
        missing = 0 if self.agreed is None else self.agreed.num_passes - len(counted)
        return counted + [(counted[-1][0], False)] * missing

    @property
    def is_cut(self) -> bool:
        """True where no micro-batch is the whole batch."""
        return len(self.micro_batches) > 1 or self.ranks.size > 1

    @property
    def micro_batches(self) -> tuple[Batch, ...]:
        """What runs, in order."""
        return self.cut.micro_batches

    def at(self, index: int) -> AbstractContextManager[object]:
        """The block in which the model runs on one micro-batch."""
        return nullcontext() if self.rows is None else self.rows.at(index)

    def forward(self, index: int) -> tuple[Tensor, Metrics]:
        """Bring one micro-batch to the device and evaluate the objective on it."""
        if self.tracker is None:
            return self._evaluate(index, self._load(index))
        self.tracker.begin(Load)
        micro_batch = self._load(index)
        self.tracker.end(Load, micro_batch=index, batch=micro_batch)
        with ForwardBoundary(self.tracker, self.model, index):
            loss, metrics = self._evaluate(index, micro_batch)
        facts = {"units": self.shares.units[index], "share": self.shares.each[index]}
        self.tracker.end(Loss, micro_batch=index, loss=loss.detach(), **facts)
        return loss, metrics

    def metrics_of(self, index: int) -> Metrics:
        """The metrics of a micro-batch that has no units and so no loss, but may have rows to count."""
        with torch.no_grad(), self.at(index):
            return detached(metrics_alone(self.objective, self.model, self._load(index)))

    def _load(self, index: int) -> Batch:
        micro_batch = self.micro_batches[index]
        return micro_batch if self.device is None else move(micro_batch, self.device)

    def _evaluate(self, index: int, micro_batch: Batch) -> tuple[Tensor, Metrics]:
        if self.autocast is None and self.rows is None:
            return evaluate(self.objective, self.model, micro_batch)
        with self.autocast or nullcontext(), self.at(index):
            return evaluate(self.objective, self.model, micro_batch)


def common_device(parameters: Iterable[nn.Parameter]) -> torch.device | None:
    """The device that all parameters share, if they do."""
    devices = {parameter.device for parameter in parameters}
    return devices.pop() if len(devices) == 1 else None


def autocast_context(autocast: Autocast, device: torch.device | None) -> AbstractContextManager[object] | None:
    if isinstance(autocast, torch.dtype):
        return torch.autocast(device.type if device is not None else "cpu", dtype=autocast)
    return autocast


def passes_fp16(parameters: Iterable[nn.Parameter], autocast: AbstractContextManager[object] | None) -> bool:
    """True where gradients pass through fp16, whose smallest number is 6e-8."""
    if isinstance(autocast, torch.autocast) and autocast.fast_dtype is torch.float16:
        return True
    return any(parameter.dtype is torch.float16 for parameter in parameters)

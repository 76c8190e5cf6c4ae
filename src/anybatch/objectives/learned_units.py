"""Units of a mean loss that nobody counts: watched while it runs in the first batch, counted on the batches after it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch.autograd_graph import leaves_of, places_behind
from anybatch.batches import Batch, tensors
from anybatch.errors import UnitsError
from anybatch.objectives.metrics import Number
from anybatch.objectives.objective import Loss, Objective, loss_and_metrics, numbers_of
from anybatch.objectives.part_losses import SeenLoss
from anybatch.objectives.seen_units import LossCall, SeenMeans, common_units

Shift = str
"""How a target is made of a tensor of the batch: as it is, without its first column, or moved on by one and padded."""
SHIFTS: Mapping[Shift, Callable[[Tensor, int], Tensor]] = {
    "as it is": lambda labels, ignored: labels,
    "without the first": lambda labels, ignored: labels[..., 1:],
    "moved on": lambda labels, ignored: F.pad(labels, (0, 1), value=ignored)[..., 1:],
}


def learned(loss: Loss) -> Objective:
    """The objective of a mean loss whose units are watched in its first batch, as `observed` does, and then counted.

    Where the one mean in the loss is one of torch's loss functions, and its target is a tensor of the batch, or that moved on
    by one, the units of later batches are counted on that tensor, with the class weights and the ignored index that the call
    had: nothing is watched any more, but in every batch whose number is a power of two, where what is seen has to be what was
    counted. Any other loss is watched as long as training goes on, for some 12 to 15 % of a small pass. Means that the loss is
    not made of do not count, and a loss that is not made of means alone is refused: give its units.
    """
    units = LearnedUnits(loss)
    return Objective(units.compute, units.count)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Counter:
    """Counts units on a batch as a loss function was seen to do."""

    tensor: int
    """Which of the batch's tensors the target is made of."""
    shift: Shift
    call: LossCall

    def __call__(self, batch: Batch) -> Number:
        labels = list(tensors(batch))[self.tensor]
        return self.call.units_of(SHIFTS[self.shift](labels, self.call.ignored))


class LearnedUnits:
    """The state of `learned`: whether the batch at hand is watched. It changes no result."""

    def __init__(self, loss: Loss) -> None:
        self._loss = loss
        self._ratios: list[float] = []
        self._places: list[int] | None = None
        """Which of the means that run the loss is made of, by number."""
        self._counter: Counter | None = None
        self._is_settled = False
        """True once a batch has shown whether units can be counted."""
        self._num_batches = 0
        self._has_run = True
        """A pass has run since units were last counted: the next count begins a batch."""
        self._is_watched = True

    def count(self, batch: Batch) -> Number:
        """1, whatever the micro-batch: its units come with its loss, so that a batch is summed in one way, watched or not."""
        if self._has_run:
            self._has_run = False
            self._num_batches += 1
            is_power = self._num_batches & (self._num_batches - 1) == 0
            self._is_watched = self._counter is None or is_power
        return 1

    def compute(self, model: nn.Module, batch: Batch) -> SeenLoss:
        """The loss of a micro-batch, and its units, counted or seen."""
        self._has_run = True
        if self._counter is not None and not self._is_watched:
            value, metrics = loss_and_metrics(self._loss(model, batch))
            return SeenLoss(loss=value, units=float(self._counter(batch)), metrics=metrics)
        with SeenMeans() as means:
            returned = self._loss(model, batch)
        value, metrics = loss_and_metrics(returned)
        places = self._places_of(value, means.nodes)
        units = common_units(numbers_of([means.units[place] for place in places]), self._ratios)
        self._learn(batch, [means.calls[place] for place in places], units)
        return SeenLoss(loss=value, units=units, metrics=metrics)

    def _places_of(self, loss: Tensor, nodes: list[Any]) -> list[int]:
        if self._places is None and loss.requires_grad:
            self._places = places_behind(loss, nodes)
            own = [nodes[place] for place in self._places]
            if own and any(True for _ in leaves_of([loss], beyond=own)):
                raise UnitsError(
                    "this loss adds something to its mean that has a gradient and was not seen to be a mean (a penalty, a sum, "
                    "a router's balance). Give units=, a function of the batch that returns what the mean divides by, if what "
                    "is added does not depend on the rows."
                )
        places = self._places or []
        return places if loss.requires_grad and max(places, default=-1) < len(nodes) else list(range(len(nodes)))

    def _learn(self, batch: Batch, calls: Sequence[LossCall | None], units: float) -> None:
        if self._counter is not None:
            counted = float(self._counter(batch))
            if abs(counted - units) > 1e-6 * max(units, 1.0):
                raise UnitsError(
                    f"this loss was seen to divide by {units:g}, where the targets of the micro-batch count {counted:g}, as "
                    "they did in the first batch: what it divides by has changed. Give units=, a function of the batch that "
                    "returns what the mean loss divides by."
                )
        elif not self._is_settled and units > 0:
            self._is_settled = True
            self._counter = None if len(calls) != 1 or calls[0] is None else _counter_of(batch, calls[0])


def _counter_of(batch: Batch, call: LossCall) -> Counter | None:
    """Which tensor of the batch the target of a call is made of, if any."""
    if call.target.is_floating_point() and not call.is_element_wise:
        return None
    wanted = call.target.detach().flatten()
    for number, tensor in enumerate(tensors(batch)):
        for shift, moved in SHIFTS.items():
            if tensor.dim() == 0 or (shift != "as it is" and tensor.dim() < 2):
                continue
            candidate: Tensor = moved(tensor, call.ignored).flatten()
            is_like = candidate.shape == wanted.shape and candidate.device == wanted.device
            if is_like and torch.equal(candidate.to(wanted.dtype), wanted):
                return Counter(number, shift, call)
    return None

"""One case, run in one go or accumulated: every run on a fresh copy, every row with the random draws it had in the first."""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from anybatch.batches import Batch, MicroBatches, Rows, move, num_rows
from anybatch.dropout import count_update, masks_of, rows_running
from anybatch.norms import batch_norms
from anybatch.objectives import Coupled, Objective, checked_loss
from anybatch.options import Autocast, BatchNorm
from anybatch.passes import Accumulator, autocast_context, common_device
from anybatch.proof.cases.copies import Copy, copy_batch, copy_model, copy_objective
from anybatch.proof.cases.float64 import ComparedPrecision, Float64, to_float64
from anybatch.proof.cases.model_state import ModelState
from anybatch.proof.cases.row_draws import Draws, recomputing, recording, replaying

BeforeRun = Callable[[nn.Module], Any]
"""Called with the copy before it runs."""


@dataclass(frozen=True, slots=True)
class Gradient:
    """What one run left: its loss, and the gradients by parameter in float64; None where the run did not touch one."""

    loss: float
    parameters: Mapping[str, Tensor | None]

    @property
    def norm(self) -> float:
        """The norm of all gradients together."""
        return math.sqrt(sum(norm_of(grad) ** 2 for grad in self.parameters.values()))


def norm_of(grad: Tensor | None) -> float:
    """The norm of a gradient, 0 for none."""
    return 0.0 if grad is None else float(grad.norm())


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, an objective and a batch, and how they are run. An experiment is the same case with one thing changed."""

    model: nn.Module
    objective: Objective | Coupled
    batch: Batch
    draws: Draws
    """What the rows draw in the model."""
    loss_draws: Draws
    """What they draw in a coupled loss."""
    batch_norm: BatchNorm | None = None
    autocast: Autocast = None
    copy: Copy | None = None
    precision: ComparedPrecision = "own"
    restores_state: bool = False
    """Whether the model is put back to its first state before every forward."""
    copies_inputs: bool = False
    """Whether every forward gets a copy of its rows."""

    @property
    def num_rows(self) -> int:
        return self.draws.num_rows

    def record(self) -> Gradient:
        """The whole batch in one go; what it draws is drawn again in every later run."""
        self.draws.whole.clear()
        self.loss_draws.whole.clear()
        return self._once(self.batch, None)

    def whole(self) -> Gradient:
        """The whole batch in one go."""
        return self._once(self.batch, range(self.num_rows))

    def once(self, batch: Batch, rows: Sequence[int], watch: BeforeRun | None = None) -> Gradient:
        """Some rows of the batch in one go, by plain torch: `loss(model, batch).backward()`."""
        return self._once(batch, rows, watch)

    def accumulated(self, cut: MicroBatches) -> Gradient:
        """The batch in micro-batches, by `Accumulator`."""
        with self._setting() as (model, objective):
            parts = MicroBatches([self._own_batch(part, model) for part in cut], cut.cut)
            masks = masks_of(model)
            if masks is not None:
                masks.strict = False  # the run in one go was watched; here following the draws moves the generators
            places = {id(part): rows for part, rows in zip(parts, cut.row_numbers, strict=True)}
            accumulator = Accumulator(
                model,
                self._followed(objective, places, model),
                micro_batch=Rows(1),
                autocast=None if self.precision == "float64" else self.autocast,
                batch_norm=self.batch_norm,
                keep_fp32=True,
            )
            with recomputing(self.draws):
                loss = accumulator.backward(parts).loss
            return Gradient(float(loss), _gradients(model, objective))

    def _once(self, batch: Batch, rows: Sequence[int] | None, watch: BeforeRun | None = None) -> Gradient:
        with self._setting() as (model, objective):
            count_update(model)  # as `Accumulator` does: row_dropout's masks are then the same
            if self.batch_norm == "frozen":
                for layer in batch_norms(model).values():
                    layer.train(layer.running_mean is None and layer.training)
            if watch is not None:
                watch(model)
            device = common_device(model.parameters())
            autocast = autocast_context(None if self.precision == "float64" else self.autocast, device)
            with recomputing(self.draws) if rows is not None else nullcontext():
                with autocast:
                    loss, _ = checked_loss(self._forward(objective, model, self._own_batch(batch, model), rows))
                loss.backward()
            return Gradient(float(loss.detach()), _gradients(model, objective))

    def _forward(
        self, objective: Objective | Coupled, model: nn.Module, batch: Batch, rows: Sequence[int] | None
    ) -> Any:
        with self._around(self.draws, rows), rows_running(model, rows or range(self.num_rows)):
            if isinstance(objective, Objective):
                return objective.loss(model, batch)
            representations = objective.encode(model, batch)
        with self._around(self.loss_draws, rows):
            return objective.loss(representations)

    @contextmanager
    def _setting(self) -> Iterator[tuple[nn.Module, Objective | Coupled]]:
        """A fresh model and objective in this precision, and quiet."""
        model, objective = copy_model(self.model, self.copy), copy_objective(self.objective)
        default = torch.get_default_dtype()
        with warnings.catch_warnings(), _visible_recurrence(model):
            warnings.simplefilter("ignore")
            try:
                if self.precision == "float64":
                    model.double()
                    if isinstance(objective.loss, nn.Module):
                        objective.loss.double()
                    torch.set_default_dtype(torch.float64)
                yield model, objective
            finally:
                torch.set_default_dtype(default)

    def _own_batch(self, batch: Batch, model: nn.Module) -> Batch:
        device = common_device(model.parameters())
        own = copy_batch(batch if device is None else move(batch, device))
        return to_float64(own) if self.precision == "float64" else own

    @contextmanager
    def _around(self, draws: Draws, rows: Sequence[int] | None) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(recording(draws) if rows is None else replaying(draws, rows))
            if self.precision == "float64":
                stack.enter_context(Float64())
            yield

    def _followed(
        self, objective: Objective | Coupled, places: Mapping[int, Sequence[int]], model: nn.Module
    ) -> Objective | Coupled:
        """The objective whose forwards draw what their rows drew in the whole batch."""
        state = ModelState.of(model) if self.restores_state else None

        def follow(function: Callable[[nn.Module, Batch], Any]) -> Callable[[nn.Module, Batch], Any]:
            def followed(model: nn.Module, batch: Batch) -> Any:
                rows = places[id(batch)]
                if state is not None:
                    state.restore(model)
                with self._around(self.draws, rows):
                    return function(model, copy_batch(batch) if self.copies_inputs else batch)

            return followed

        if isinstance(objective, Objective):
            return replace(objective, loss=follow(objective.loss))
        joined = [row for rows in places.values() for row in rows]
        return replace(objective, encode=follow(objective.encode), loss=_FollowedLoss(self, objective.loss, joined))


class _FollowedLoss(nn.Module):
    """A coupled loss over all rows, in the order that they were cut in; its own parameters stay its parameters."""

    def __init__(self, case: Case, loss: Callable[[Any], Any], rows: Sequence[int]) -> None:
        super().__init__()
        self.loss = loss
        self._case, self._rows = case, rows

    def forward(self, representations: Any) -> Any:
        with self._case._around(self._case.loss_draws, self._rows):
            return self.loss(representations)


def make_case(model: nn.Module, objective: Objective | Coupled, batch: Batch, **options: Any) -> Case:
    """The case of this batch, whose draws are still to be recorded."""
    count, is_left = num_rows(batch), _is_left_padded(batch)
    return Case(
        model=model,
        objective=objective,
        batch=batch,
        draws=Draws(count, is_left),
        loss_draws=Draws(count, is_left),
        **options,
    )


def _is_left_padded(batch: Batch) -> bool:
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return isinstance(mask, Tensor) and mask.dim() == 2 and bool((mask[:, -1] != 0).all() and (mask[:, 0] == 0).any())


@contextmanager
def _visible_recurrence(model: nn.Module) -> Iterator[None]:
    """cuDNN draws the dropout between recurrent layers inside its kernel, where it cannot be seen."""
    is_hidden = any(isinstance(module, nn.RNNBase) and module.dropout > 0 for module in model.modules())
    with torch.backends.cudnn.flags(enabled=False) if is_hidden else nullcontext():
        yield


def _gradients(model: nn.Module, objective: Objective | Coupled) -> dict[str, Tensor | None]:
    named = dict(model.named_parameters())
    if isinstance(objective, Coupled) and isinstance(objective.loss, nn.Module):
        own = set(map(id, named.values()))
        named |= {f"loss.{name}": held for name, held in objective.loss.named_parameters() if id(held) not in own}
    return {
        name: None if held.grad is None else held.grad.detach().to_dense().double().cpu()
        for name, held in named.items()
        if held.requires_grad
    }

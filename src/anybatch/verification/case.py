"""One case, run in one go or accumulated: every run on a fresh copy, every row with the random draws it had in the first."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from anybatch.batch_norm import batch_norms
from anybatch.core import (
    Accumulator,
    Autocast,
    Batch,
    BatchNorm,
    Coupled,
    Cut,
    MicroBatches,
    Objective,
    Rows,
    autocast_context,
    checked_loss,
    common_device,
    map_tensors,
    num_rows,
    rows_in_dim,
)
from anybatch.dropout import count_update, masks_of, rows_running
from anybatch.verification.compared_precision import ComparedPrecision, Raised, keep_in_backward, raised
from anybatch.verification.copies import (
    Copy,
    ModelState,
    ObjectiveState,
    copy_batch,
    copy_model,
    free_parameters,
    functions_of,
    objective_state,
)
from anybatch.verification.draws import Draws, recomputing, recording, replaying
from anybatch.verification.floor import Gradient, add_norm, gradients_of

BeforeRun = Callable[[nn.Module], "Callable[[], None] | None"]
"""Called with the copy before it runs; what it returns is called when that is done, before anything is put back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, an objective and a batch, and how they are run. An experiment is the same case with one thing changed."""

    model: nn.Module
    """The user's; what runs is a copy, and there is one at a time."""
    objective: Objective | Coupled
    held: ObjectiveState
    batch: Batch
    """Rows first."""
    draws: Draws
    """Random draws of the rows in the model."""
    loss_draws: Draws
    """Random draws of the rows in a coupled loss."""
    batch_norm: BatchNorm | None = None
    autocast: Autocast = None
    copy: Copy | None = None
    batch_dim: int | None = None
    """The dim that is the rows where the model runs."""
    precision: ComparedPrecision = "own"
    restores_state: bool = False
    """Whether the model is put back to its first state before every forward."""
    copies_inputs: bool = False
    """Whether every forward gets a copy of its rows."""

    @property
    def num_rows(self) -> int:
        return self.draws.num_rows

    def quiet(self) -> "Case":
        """The case in which every random draw is its mean: to be recorded."""
        return replace(
            self, **{name: replace(getattr(self, name), **_new_draws(True)) for name in ("draws", "loss_draws")}
        )

    def record(self) -> Gradient:
        """The whole batch in one go; what it draws is drawn again in every later run."""
        self.draws.start()
        self.loss_draws.start()
        return self._once(self.batch, None)

    def whole(self) -> Gradient:
        """The whole batch in one go."""
        return self._once(self.batch, range(self.num_rows))

    def once(self, batch: Batch, rows: Sequence[int], watch: BeforeRun | None = None) -> Gradient:
        """Some rows of the batch in one go, by plain torch: `loss(model, batch).backward()`."""
        return self._once(batch, rows, watch)

    def accumulated(self, cut: MicroBatches) -> Gradient:
        """The batch in micro-batches, by `Accumulator`."""
        with self._setting() as model:
            known: dict[int, tuple[Tensor, Tensor]] = {}
            numbers = Cut(rows=cut.row_numbers, lengths=(1,) * len(cut)) if self.batch_dim else cut.cut
            parts = MicroBatches([self._own_batch(part, model, known) for part in cut], numbers)
            masks = masks_of(model)
            if masks is not None:
                masks.strict = False  # the run in one go was watched; here following the draws moves the generators
            places = {id(part): rows for part, rows in zip(parts, cut.row_numbers, strict=True)}
            followed = self._followed(places, model)
            own_loss = set(map(id, followed.parameters()))
            extra = [held for held in self.held.parameters.values() if id(held) not in own_loss]
            named = self._named(model)
            terms: dict[str, Tensor] = {}
            self.draws.start_run()
            meters = [held.register_hook(partial(add_norm, terms, name)) for name, held in named.items()]
            accumulator = Accumulator(
                model,
                followed,
                micro_batch=Rows(1),
                autocast=self.autocast if self.precision == "own" else None,
                batch_norm=self.batch_norm,
                keep_fp32=True,
                parameters=lambda: [*model.parameters(), *extra],
            )
            try:
                with recomputing(self.draws):
                    loss = accumulator.backward(parts).loss
            finally:
                for meter in meters:
                    meter.remove()
            return Gradient(float(loss), gradients_of(named), {name: float(norm) for name, norm in terms.items()})

    def _once(self, batch: Batch, rows: Sequence[int] | None, watch: BeforeRun | None = None) -> Gradient:
        with self._setting() as model:
            count_update(model)  # as `Accumulator` does: row_dropout's masks are then the same
            if self.batch_norm == "frozen":
                for layer in batch_norms(model).values():
                    layer.train(layer.running_mean is None and layer.training)
            done = None if watch is None else watch(model)
            device = common_device(model.parameters())
            autocast = autocast_context(self.autocast if self.precision == "own" else None, device)
            with autocast:
                loss, _ = checked_loss(self._forward(model, self._own_batch(batch, model), rows))
            with recomputing(self.draws, is_first=rows is None):
                torch.autograd.backward(loss)
            if done is not None:
                done()
            return Gradient(float(loss.detach()), gradients_of(self._named(model)))

    def _forward(self, model: nn.Module, batch: Batch, rows: Sequence[int] | None) -> Any:
        objective = self.objective
        with self._drawing(self.draws, rows), rows_running(model, rows or range(self.num_rows)):
            if isinstance(objective, Objective):
                return objective.loss(model, batch)
            representations = objective.encode(model, batch)
        with self._drawing(self.loss_draws, rows):
            return objective.loss(representations)

    @contextmanager
    def _setting(self) -> Iterator[nn.Module]:
        """A fresh model in this precision, the objective as it was at first, and quiet."""
        is_raised = self.precision == "float64"
        model = copy_model(self.model, self.copy)
        for module in model.modules():
            if self.draws.is_quiet and isinstance(module, nn.RReLU):
                module.training = False  # it draws inside its kernel
        default = torch.get_default_dtype()
        with ExitStack() as stack:
            stack.callback(free_parameters, model)  # somebody may hold the model in a circle until the next collection
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            stack.enter_context(_visible_recurrence(model))
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))  # its dropout is an operation of its own
            stack.enter_context(self.held.fresh(is_raised=is_raised))
            if is_raised:
                stack.callback(torch.set_default_dtype, default)
                torch.set_default_dtype(torch.float64)
                model.double()
                keep_in_backward(model)
                stack.enter_context(Raised())
            yield model

    def _own_batch(
        self, batch: Batch, model: nn.Module, known: dict[int, tuple[Tensor, Tensor]] | None = None
    ) -> Batch:
        """A copy where the model runs, in its precision; `known` are the copies of tensors that micro-batches share."""
        device = common_device(model.parameters())
        known = {} if known is None else known

        def copied(tensor: Tensor) -> Tensor:
            if id(tensor) not in known:
                there = tensor.detach().to(device or tensor.device, copy=True)
                known[id(tensor)] = tensor, raised(there) if self.precision == "float64" else there
            return known[id(tensor)][1]

        return map_tensors(rows_in_dim(batch, self.batch_dim) if self.batch_dim else batch, copied)

    def _named(self, model: nn.Module) -> dict[str, nn.Parameter]:
        named = dict(model.named_parameters()) | self.held.parameters
        return {name: held for name, held in named.items() if held.requires_grad}

    @contextmanager
    def _drawing(self, draws: Draws, rows: Sequence[int] | None, *, is_later: bool = False) -> Iterator[None]:
        with recording(draws) if rows is None else replaying(draws, rows, is_later=is_later):
            yield

    def _followed(self, places: Mapping[int, Sequence[int]], model: nn.Module) -> Objective | Coupled:
        """The objective whose forwards draw what their rows drew in the whole batch."""
        objective = self.objective
        state = ModelState.of(model, functions_of(objective)) if self.restores_state else None
        ran: set[int] = set()

        def follow(function: Callable[[nn.Module, Batch], Any]) -> Callable[[nn.Module, Batch], Any]:
            def followed(model: nn.Module, batch: Batch) -> Any:
                rows = places[id(batch)]
                if state is not None:
                    state.restore()
                is_later = bool(ran - {id(batch)})
                ran.add(id(batch))
                with self._drawing(self.draws, rows, is_later=is_later):
                    return function(model, copy_batch(batch) if self.copies_inputs else batch)

            return followed

        if isinstance(objective, Objective):
            return replace(objective, loss=follow(objective.loss))
        joined = [row for rows in places.values() for row in rows]
        return replace(objective, encode=follow(objective.encode), loss=_FollowedLoss(self, objective, joined))


class _FollowedLoss(nn.Module):
    """A coupled loss over all rows, in the order that they were cut in; its own parameters stay its parameters."""

    def __init__(self, case: Case, objective: Coupled, rows: Sequence[int]) -> None:
        super().__init__()
        self._case, self._rows = case, rows
        self._objective = objective
        self._own = set(map(id, objective.parameters()))

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        yield from (held for held in self._case.held.parameters.values() if id(held) in self._own)

    def forward(self, representations: Any) -> Any:
        with self._case._drawing(self._case.loss_draws, self._rows):
            return self._objective.loss(representations)


def make_case(
    model: nn.Module,
    objective: Objective | Coupled,
    batch: Batch,
    *,
    held: ObjectiveState | None = None,
    **options: Any,
) -> Case:
    """The case of this batch, whose draws are still to be recorded."""
    count, is_left = num_rows(batch), _is_left_padded(batch)
    return Case(
        model=model,
        objective=objective,
        held=held or objective_state(objective, model),
        batch=batch,
        draws=Draws(count, is_left),
        loss_draws=Draws(count, is_left),
        **options,
    )


def _new_draws(is_quiet: bool) -> dict[str, Any]:
    empty: dict[str, Any] = {name: [] for name in ("whole", "strange", "seeded", "orders", "unlike", "again")}
    return empty | {"shared": {}, "_seen": {}, "_own": {}, "is_quiet": is_quiet}


def _is_left_padded(batch: Batch) -> bool:
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return isinstance(mask, Tensor) and mask.dim() == 2 and bool((mask[:, -1] != 0).all() and (mask[:, 0] == 0).any())


@contextmanager
def _visible_recurrence(model: nn.Module) -> Iterator[None]:
    """cuDNN draws the dropout between recurrent layers inside its kernel, where it cannot be seen."""
    is_hidden = any(isinstance(module, nn.RNNBase) and module.dropout > 0 for module in model.modules())
    with torch.backends.cudnn.flags(enabled=False) if is_hidden else nullcontext():
        yield

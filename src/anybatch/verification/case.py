"""A case: one model, objective and batch, run in one pass or accumulated, each time on a fresh copy."""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from anybatch.batch_norm import batch_norms, uses_batch_statistics
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
    count_units,
    map_tensors,
    num_rows,
    rows_in_dim,
    take_rows,
)
from anybatch.dropout import count_update, masks_of, rows_running
from anybatch.verification.draws import Draws, drawing, recomputing, replaying
from anybatch.verification.floor import Floor, Gradient, add_norm, gradients_of, largest_floor, relative
from anybatch.verification.precision import ComparedPrecision, HigherPrecision, keep_in_backward, raised
from anybatch.verification.state import Copy, PythonState, copy_batch, copy_model, functions_of
from anybatch.verification.verdict import CutResult, RowWeights

Forward = Callable[[nn.Module, Batch], Any]
"""The part of an objective that runs the model: the loss, or a coupled loss's `encode`."""
BeforeRun = Callable[[nn.Module], "Callable[[], None] | None"]
"""Called with the copy before it runs; the function it returns is called after the run, before state is restored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, an objective, a batch, and options of a run. An experiment is the same case with one thing changed."""

    model: nn.Module
    """The user's model; runs use one copy at a time."""
    objective: Objective | Coupled
    held: PythonState
    """State that the objective reaches."""
    batch: Batch
    """Rows first."""
    draws: Draws
    """Random draws in the model."""
    loss_draws: Draws
    """Random draws in a coupled loss."""
    batch_norm: BatchNorm | None = None
    autocast: Autocast = None
    copy: Copy | None = None
    batch_dim: int | None = None
    """The dimension of the rows in the model's inputs."""
    precision: ComparedPrecision = "own"
    restores_state: bool = False
    """True to restore the first state of the model before every forward."""
    copies_inputs: bool = False
    """True to give every forward a copy of its rows."""

    @property
    def num_rows(self) -> int:
        return self.draws.num_rows

    def of_first(self, count: int) -> "Case":
        """Return the case of the first rows, without recorded draws."""
        batch = take_rows(self.batch, slice(0, count))
        return replace(self, batch=batch, draws=_draws_of(batch), loss_draws=_draws_of(batch))

    def record(self) -> Gradient:
        """Run the whole batch in one pass, and record its draws for all later runs."""
        self.draws.start()
        self.loss_draws.start()
        return self.once(self.batch, None)

    def whole(self) -> Gradient:
        """Run the whole batch in one pass."""
        return self.once(self.batch, range(self.num_rows))

    def once(self, batch: Batch, rows: Sequence[int] | None, watch: BeforeRun | None = None) -> Gradient:
        """Run these rows by plain torch, `loss(model, batch).backward()`; with `rows=None` record the draws."""
        with self._setting() as model:
            count_update(model)  # as `Accumulator` does: row_dropout's masks are then the same
            if self.batch_norm == "frozen":
                for layer in batch_norms(model).values():
                    layer.train(layer.running_mean is None and layer.training)
            done = None if watch is None else watch(model)
            with autocast_context(self._autocast, common_device(model.parameters())):
                loss, _ = checked_loss(self._forward(model, self._own_batch(batch, model, {}), rows))
            with recomputing(self.draws, is_first=rows is None):
                torch.autograd.backward(loss)
            if done is not None:
                done()
            return Gradient(float(loss.detach()), gradients_of(self._named(model)))

    def accumulated(self, cut: MicroBatches) -> Gradient:
        """Run the batch in micro-batches, by `Accumulator`."""
        with self._setting() as model:
            known: dict[int, tuple[Tensor, Tensor]] = {}
            numbers = Cut(rows=cut.row_numbers, lengths=(1,) * len(cut)) if self.batch_dim else cut.cut
            parts = MicroBatches([self._own_batch(part, model, known) for part in cut], numbers)
            masks = masks_of(model)
            if masks is not None:
                masks.strict = False  # replaying the draws moves the generators
            places = {id(part): rows for part, rows in zip(parts, cut.row_numbers, strict=True)}
            followed = self._replayed(places, model)
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
                autocast=self._autocast,
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

    @property
    def _autocast(self) -> Autocast:
        return self.autocast if self.precision == "own" else None

    def _forward(self, model: nn.Module, batch: Batch, rows: Sequence[int] | None) -> Any:
        objective = self.objective
        with drawing(self.draws, rows), rows_running(model, rows or range(self.num_rows)):
            if isinstance(objective, Objective):
                return objective.loss(model, batch)
            representations = objective.encode(model, batch)
        with drawing(self.loss_draws, rows):
            return objective.loss(representations)

    @contextmanager
    def _setting(self) -> Iterator[nn.Module]:
        """Yield a fresh copy of the model in this precision, with the objective in its first state and warnings off."""
        is_raised = self.precision == "float64"
        model = copy_model(self.model, self.copy)
        for module in model.modules():
            if self.draws.is_quiet and isinstance(module, nn.RReLU):
                module.training = False  # it draws inside its kernel
        default = torch.get_default_dtype()
        with ExitStack() as stack:
            stack.callback(_free_parameters, model)  # a reference cycle may keep the copy alive
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            if any(isinstance(module, nn.RNNBase) and module.dropout > 0 for module in model.modules()):
                # cuDNN draws the dropout between recurrent layers inside its kernel
                stack.enter_context(torch.backends.cudnn.flags(enabled=False))
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))  # the only one with a dropout operation to replay
            stack.enter_context(self.held.fresh(is_raised=is_raised))
            if is_raised:
                stack.callback(torch.set_default_dtype, default)
                torch.set_default_dtype(torch.float64)
                model.double()
                keep_in_backward(model)
                stack.enter_context(HigherPrecision())
            yield model

    def _own_batch(self, batch: Batch, model: nn.Module, known: dict[int, tuple[Tensor, Tensor]]) -> Batch:
        """Copy rows to the model's device and precision; `known` holds copies of tensors that micro-batches share."""
        device = common_device(model.parameters())

        def copied(tensor: Tensor) -> Tensor:
            if id(tensor) not in known:
                there = tensor.detach().to(device or tensor.device, copy=True)
                known[id(tensor)] = tensor, raised(there) if self.precision == "float64" else there
            return known[id(tensor)][1]

        return map_tensors(rows_in_dim(batch, self.batch_dim) if self.batch_dim else batch, copied)

    def _named(self, model: nn.Module) -> dict[str, nn.Parameter]:
        named = dict(model.named_parameters()) | self.held.parameters
        return {name: held for name, held in named.items() if held.requires_grad}

    def _replayed(self, places: Mapping[int, Sequence[int]], model: nn.Module) -> Objective | Coupled:
        """Return the objective with forwards that draw what their rows drew in the whole batch."""
        objective = self.objective
        state = None
        if self.restores_state:
            state = PythonState(model, *functions_of(objective), owned=[*model.modules()], keeps_tensors=True)
        ran: set[int] = set()

        def wrap(function: Forward) -> Forward:
            def replayed(model: nn.Module, batch: Batch) -> Any:
                rows = places[id(batch)]
                if state is not None:
                    state.put_back()
                is_later = bool(ran - {id(batch)})
                ran.add(id(batch))
                with replaying(self.draws, rows, is_later=is_later):
                    return function(model, copy_batch(batch) if self.copies_inputs else batch)

            return replayed

        wrapped = with_forward(objective, wrap)
        if isinstance(wrapped, Objective):
            return wrapped
        joined = [row for rows in places.values() for row in rows]
        return replace(wrapped, loss=_ReplayedLoss(self, wrapped, joined))


def with_forward(objective: Objective | Coupled, wrap: Callable[[Forward], Forward]) -> Objective | Coupled:
    """Return the objective with its function of model and rows wrapped."""
    if isinstance(objective, Objective):
        return replace(objective, loss=wrap(objective.loss))
    return replace(objective, encode=wrap(objective.encode))


class _ReplayedLoss(nn.Module):
    """A coupled loss over all rows, in the order of the cut, with its draws replayed and its own parameters."""

    def __init__(self, case: Case, objective: Coupled, rows: Sequence[int]) -> None:
        super().__init__()
        self._case, self._rows = case, rows
        self._objective = objective
        self._own = set(map(id, objective.parameters()))

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        yield from (held for held in self._case.held.parameters.values() if id(held) in self._own)

    def forward(self, representations: Any) -> Any:
        with replaying(self._case.loss_draws, self._rows):
            return self._objective.loss(representations)


def make_case(
    model: nn.Module,
    objective: Objective | Coupled,
    batch: Batch,
    *,
    held: PythonState | None = None,
    **options: Any,
) -> Case:
    """Return the case of this batch, without recorded draws."""
    return Case(
        model=model,
        objective=objective,
        held=held or PythonState(*functions_of(objective), owned=[*model.modules()]),
        batch=batch,
        draws=_draws_of(batch),
        loss_draws=_draws_of(batch),
        **options,
    )


def uneven_cut(batch: Batch, together: int = 1) -> MicroBatches:
    """Cut into at most 4 micro-batches of 2, 3, 4, ... rows, or 1, 2, ... if there are few, so that all weights differ.

    With `together`, sizes are multiples of it, so that groups of neighbours stay together.
    """
    count = num_rows(batch) // together
    sizes: list[int] = []
    left, size = count, 2 if count >= 5 else 1
    while len(sizes) < 3 and left - size > size:
        sizes.append(size)
        left, size = left - size, size + 1
    sizes.append(left)
    stops = (torch.tensor(sizes).cumsum(0) * together).tolist()
    starts = [0, *stops[:-1]]
    return MicroBatches([take_rows(batch, slice(start, stop)) for start, stop in zip(starts, stops, strict=True)])


def cut_by_rows(batch: Batch, parts: Sequence[Sequence[int]]) -> MicroBatches:
    places = Cut(rows=tuple(map(tuple, parts)), lengths=(1,) * len(parts))
    return MicroBatches([take_rows(batch, list(rows)) for rows in parts], places)


def _free_parameters(twin: nn.Module) -> None:
    """Free the parameters and gradients of a copy at once; its buffers may be the user's own."""
    for parameter in twin.parameters():
        parameter.grad = None
        parameter.data = parameter.data.new_empty(0)


def _draws_of(batch: Batch) -> Draws:
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    is_left = (
        isinstance(mask, Tensor) and mask.dim() == 2 and bool((mask[:, -1] != 0).all() and (mask[:, 0] == 0).any())
    )
    return Draws(num_rows(batch), is_left)


CLEAR_FALL = 3.0
"""A change is one of several causes if the error falls by this factor but not to the floor."""


def compare(case: Case, cut: MicroBatches, floor: Floor, *, name: str = "", decides: bool = True) -> CutResult:
    """Compare the accumulated gradient of this cut with the whole batch's."""
    result = CutResult(
        name=name,
        precision=case.precision,
        micro_batches=len(cut),
        rows=tuple(len(numbers) for numbers in cut.row_numbers),
        error=math.inf,
        parameters=(),
        decides=decides,
    )
    try:
        accumulated = case.accumulated(cut)
    except Exception as error:  # a cut that cannot run is a finding
        return replace(result, failure=f"{type(error).__name__}: {error}")
    return replace(result, error=relative(floor.whole, accumulated), parameters=floor.errors(accumulated, len(cut)))


def explains(after: CutResult, before: CutResult) -> bool:
    """True if the change removed a cause of the error."""
    return after.is_exact or (after.failure is None and after.error * CLEAR_FALL < before.error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiments:
    """A case with a wrong accumulated gradient; an experiment runs it again with one thing changed."""

    case: Case
    floor: Floor
    cut: MicroBatches
    """The cut that shows the error best."""
    trained: MicroBatches
    """The cut of training."""

    @property
    def objective(self) -> Objective | None:
        """The objective; None if it is coupled."""
        return self.case.objective if isinstance(self.case.objective, Objective) else None

    @property
    def is_drawn(self) -> bool:
        return self.case.draws.is_drawn or self.case.loss_draws.is_drawn

    def without_draws(self) -> "Experiments":
        """Return the same experiments with every random draw at its mean."""
        draws = [replace(_draws_of(self.case.batch), is_quiet=True) for _ in range(2)]
        quiet = replace(self.case, draws=draws[0], loss_draws=draws[1])
        return replace(self, case=quiet, floor=replace(self.floor, whole=quiet.record()))

    def try_out(self, case: Case, cut: MicroBatches | None = None) -> CutResult:
        return compare(case, cut or self.cut, self.floor)

    def each_alone(self) -> list[Gradient]:
        """Return the gradient of each micro-batch by itself."""
        return [self.case.once(part, rows) for part, rows in zip(self.cut, self.cut.row_numbers, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class BestWeights:
    """Least-squares weights of the micro-batches' gradients: the minimum over w of |whole - sum_k w_k g_k| / |whole|."""

    weights: tuple[float, ...]
    residual: float
    """The minimum."""
    is_unique: bool
    """False if other weights are as good: the gradients are collinear, or have too few numbers."""
    tolerance: float
    loss: float
    losses: tuple[float, ...]
    """Loss of each micro-batch alone."""

    @property
    def fits(self) -> bool:
        """True if the whole batch's gradient is a weighted sum of the micro-batches'."""
        return self.residual <= self.tolerance

    @property
    def is_mean(self) -> bool:
        """True if the weights are positive and sum to 1, and give the whole batch's loss too."""
        terms = [weight * loss for weight, loss in zip(self.weights, self.losses, strict=True)]
        size = max(abs(self.loss), sum(map(abs, terms)))
        adds_up = abs(sum(terms) - self.loss) <= 1000 * self.tolerance * size
        return abs(sum(self.weights) - 1) <= 100 * self.tolerance and adds_up and min(self.weights) > self.tolerance


def best_weights(experiments: Experiments) -> BestWeights | None:
    """Fit the weights of the cut; None if a micro-batch alone has no finite gradient.

    BatchNorm uses its running statistics here, because batch statistics couple rows whatever their weights.
    """
    if any(uses_batch_statistics(layer) for layer in batch_norms(experiments.case.model).values()):
        frozen = replace(experiments.case, batch_norm="frozen")
        experiments = replace(experiments, case=frozen, floor=replace(experiments.floor, whole=frozen.whole()))
    each = experiments.each_alone()
    columns = len(each) + 1
    triangle = torch.zeros(0, columns, dtype=torch.float64)
    numel = 0
    for name, whole in experiments.floor.whole.parameters.items():
        grads = [*(gradient.parameters[name] for gradient in each), whole]
        known = next((grad for grad in grads if grad is not None), None)
        if known is None:
            continue
        numel += known.numel()
        block = torch.stack([flat(grad, known) for grad in grads], dim=1)
        triangle = torch.linalg.qr(torch.cat([triangle, block]), mode="r").R  # one parameter at a time, to save memory
    if not bool(triangle.isfinite().all()) or len(triangle) < columns:
        return None
    matrix, wanted = triangle[:, :-1], triangle[:, -1]
    values = torch.linalg.svdvals(matrix)
    norm = float(wanted.norm())
    if not norm:
        return None
    solution = torch.linalg.lstsq(matrix, wanted.unsqueeze(1), driver="gelsd").solution.flatten()
    return BestWeights(
        weights=tuple(solution.tolist()),
        residual=float((matrix @ solution - wanted).norm()) / norm,
        is_unique=numel > 2 * columns and float(values[-1]) > 1e-7 * float(values[0]),
        tolerance=10 * largest_floor(experiments.floor.unit),
        loss=experiments.floor.whole.loss,
        losses=tuple(gradient.loss for gradient in each),
    )


def weights_of_rows(experiments: Experiments, trained: MicroBatches, *, is_wrong: bool) -> tuple[RowWeights, ...]:
    """Return the weights of the rows of each micro-batch; if all is exact, of the cut of training."""
    if not is_wrong:
        count = experiments.case.num_rows
        return tuple(
            RowWeights(rows=rows, weight=len(rows) / count, wanted=len(rows) / count) for rows in trained.row_numbers
        )
    objective = experiments.objective
    if objective is None or objective.terms:
        return ()
    try:
        used = shares_of(count_units(objective, experiments.case.model, experiments.cut.micro_batches))
        best = best_weights(experiments)
    except Exception:  # a micro-batch that cannot run alone
        return ()
    if objective.reduction == "sum":
        used = [1.0] * len(used)
    is_known = best is not None and best.fits and best.is_unique
    wanted = best.weights if best is not None and is_known else (None,) * len(used)
    return tuple(
        RowWeights(rows=rows, weight=weight, wanted=right if right is None or math.isfinite(right) else None)
        for rows, weight, right in zip(experiments.cut.row_numbers, used, wanted, strict=True)
    )


def shares_of(values: list[float] | tuple[float, ...]) -> list[float]:
    """Divide the values by their sum."""
    total = sum(values)
    return [value / total for value in values] if total else list(values)


def flat(grad: Tensor | None, like: Tensor) -> Tensor:
    if grad is None:
        return torch.zeros(like.numel(), dtype=torch.float64)
    return grad.to("cpu", torch.float64).flatten()

"""How experiments are made: one case in the best precision there is, and one cut whose gradient is wrong."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from anybatch.batch_norm import batch_norms, uses_batch_statistics
from anybatch.core import MicroBatches, Objective, count_units
from anybatch.verification.case import Case
from anybatch.verification.floor import Floor, Gradient, largest_floor, relative
from anybatch.verification.verdict import RowWeights

CLEAR_FALL = 3.0
"""A change is one of several causes if the error falls by this factor, though not to the floor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentResult:
    """Result of accumulating in one experiment."""

    error: float
    is_exact: bool
    failure: str | None = None

    def explains(self, before: "ExperimentResult") -> bool:
        """True if what was changed is a cause of the error there was before."""
        return self.is_exact or (self.failure is None and self.error * CLEAR_FALL < before.error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiments:
    """A case whose accumulated gradient is wrong in one cut; an experiment runs it again with one thing changed."""

    case: Case
    floor: Floor
    cut: MicroBatches
    trained: MicroBatches
    """The cut that trains; the same where that shows most."""

    @property
    def objective(self) -> Objective | None:
        """The objective, where it is not coupled."""
        return self.case.objective if isinstance(self.case.objective, Objective) else None

    @property
    def is_drawn(self) -> bool:
        """True where anything was drawn at random."""
        return self.case.draws.is_drawn or self.case.loss_draws.is_drawn

    def without_draws(self) -> "Experiments":
        """The same with every random draw at its mean."""
        quiet = self.case.quiet()
        whole = quiet.record()
        return replace(self, case=quiet, floor=replace(self.floor, whole=whole))

    def try_out(self, case: Case, cut: MicroBatches | None = None) -> ExperimentResult:
        """The error of this case in the cut, against the gradient of the whole batch."""
        cut = cut or self.cut
        try:
            accumulated = case.accumulated(cut)
        except Exception as error:  # whatever a model raises on a few rows is an outcome
            return ExperimentResult(error=math.inf, is_exact=False, failure=f"{type(error).__name__}: {error}")
        errors = self.floor.errors(accumulated, len(cut))
        return ExperimentResult(
            error=relative(self.floor.whole, accumulated), is_exact=all(parameter.is_exact for parameter in errors)
        )

    def each_alone(self) -> list[Gradient]:
        """The gradient of each micro-batch by itself."""
        return [self.case.once(part, rows) for part, rows in zip(self.cut, self.cut.row_numbers, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class BestWeights:
    """The weights of the micro-batches' gradients that come nearest to the whole batch's.

    min over w of |whole - sum_k w_k g_k| / |whole|
    """

    weights: tuple[float, ...]
    residual: float
    """How far away that still is."""
    is_unique: bool
    """False where other weights do as well: the gradients lie on one line, or there are too few numbers."""
    tolerance: float
    loss: float
    losses: tuple[float, ...]
    """Losses of the whole batch, and of each micro-batch alone."""

    @property
    def fits(self) -> bool:
        """True where the whole batch's gradient is a weighted sum of the micro-batches'."""
        return self.residual <= self.tolerance

    @property
    def is_mean(self) -> bool:
        """True where the weights sum to 1, as those of a mean do, and make the losses that of the whole batch too."""
        terms = [weight * loss for weight, loss in zip(self.weights, self.losses, strict=True)]
        size = max(abs(self.loss), sum(map(abs, terms)))
        adds_up = abs(sum(terms) - self.loss) <= 1000 * self.tolerance * size
        return abs(sum(self.weights) - 1) <= 100 * self.tolerance and adds_up and min(self.weights) > self.tolerance


def best_weights(experiments: Experiments) -> BestWeights | None:
    """Fit the weights of the experiments' cut; None if a micro-batch alone has no finite gradient.

    BatchNorm, which is looked for elsewhere, has the running statistics here: it would couple rows whatever their weights.
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
        block = torch.stack([_flat(grad, known) for grad in grads], dim=1)
        triangle = torch.linalg.qr(torch.cat([triangle, block]), mode="r").R  # of all parameters, a few rows at a time
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
    """Weights of the rows of each micro-batch; if all is exact, of the cut that trains."""
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
    except Exception:  # rows that cannot run alone
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
    """Each as a part of their sum."""
    total = sum(values)
    return [value / total for value in values] if total else list(values)


def _flat(grad: Tensor | None, like: Tensor) -> Tensor:
    if grad is None:
        return torch.zeros(like.numel(), dtype=torch.float64)
    return grad.to("cpu", torch.float64).flatten()

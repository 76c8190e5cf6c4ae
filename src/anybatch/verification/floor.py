"""The floor: the largest error of a gradient that the order of summation explains.

The floor is measured, because no formula says how much a floating-point sum depends on its order. For each parameter

    floor = [ 6 max(|permuted - whole|, |whole - float64|)  +  2 u |terms|  +  v (1 + sqrt(K)) (2 |terms| + |all|) ] / scale

`permuted` is the whole batch in one pass with its rows in another order. `float64` is the whole batch in float64, for lower
precisions. u is the unit roundoff of the precision; every gradient is rounded once. v is the unit roundoff of the sums, which
are fp32 for bf16 and fp16; the roundings of K additions grow as a random walk. |terms| is the sum of the norms of what
micro-batches add: near a minimum the terms cancel, and the rounding that is left is in proportion to them. |all| is the norm
of the gradient of all parameters: a gradient that is zero but for rounding (the bias of attention's keys, of a layer before
BatchNorm) has an error in proportion to it.

In float64 the floor is 32 times as large: a cut changes the shapes that kernels sum over, a permutation does not, and no finer
precision shows by how much. No mistake is as small as 1e-12. Over 17 sound models, 6 seeds each, the error was at most 0.28
of the floor without this factor.

The floor is at most `largest_floor(u)` of |all|, so that noise in the model cannot hide behind it. Errors and floors are
relative to `scale`: the norm of the parameter's gradient, or a millionth of |all| if that is larger.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

SAFETY = 6.0
"""One or two permutations are a small sample of all orders of summation."""
FLOAT64_FACTOR = 32.0
"""Factor of the float64 floor: no finer precision shows how far off it is."""
UNIT_OF_SUMS = 2.0**-24
"""The unit roundoff of fp32, in which gradients are summed."""
MOST_ROUNDOFFS = 2000.0
"""The largest floor, in units of roundoff."""
LEAST_BOUND = 1e-10
"""The largest floor of the finest precision."""
SMALLEST_SCALE = 1e-6
"""Share of all gradients below which a parameter's own gradient is no measure of its error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterDeviation:
    """Error of the accumulated gradient of one parameter.

    Attributes:
        name: Name of the parameter in the model; parameters outside it are named by the variable that holds them.
        error: |accumulated - whole| / |whole|.
        floor: Largest error that the order of summation explains.
    """

    name: str
    error: float
    floor: float

    @property
    def is_exact(self) -> bool:
        """True if the error is within the floor."""
        return self.error <= self.floor


ParameterError = ParameterDeviation
"""Name of `ParameterDeviation` up to version 0.2; not an exception."""


@dataclass(frozen=True, slots=True)
class Gradient:
    """Loss and gradients of one run, by parameter; None for a parameter without gradient."""

    loss: float
    parameters: Mapping[str, Tensor | None]
    terms: Mapping[str, float] = field(default_factory=dict)
    """Sum of the norms of the per-micro-batch gradients, by parameter; empty for the whole batch in one pass."""

    @property
    def norms(self) -> dict[str, float]:
        return {name: _norm_of(grad) for name, grad in self.parameters.items()}

    def distances(self, other: "Gradient") -> dict[str, float]:
        return {name: _distance(grad, other.parameters[name]) for name, grad in self.parameters.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """The whole batch's gradient in one precision, and its uncertainty."""

    whole: Gradient
    spread: dict[str, float]
    """Distance to the gradient of another order, and of float64."""
    unit: float
    """Unit roundoff."""
    is_widened: bool = False
    """True if `spread` includes the effect of rounding the parameters, and is not bounded."""

    def widened(self, perturbed: Gradient) -> "Floor":
        """Return the floor that includes the effect of rounding the parameters.

        If the terms of a loss cancel (at a minimum, for example), the gradient consists of rounding, and so does its error.
        """
        distances = self.whole.distances(perturbed)
        spread = {name: max(self.spread[name], apart) for name, apart in distances.items()}
        return replace(self, spread=spread, is_widened=True)

    def errors(self, accumulated: Gradient, num_micro_batches: int) -> tuple[ParameterDeviation, ...]:
        """Return the error of each parameter, and its floor for so many micro-batches."""
        norms, distances, unit = self.whole.norms, self.whole.distances(accumulated), self.unit
        terms = {name: max(norm, accumulated.terms.get(name, 0.0)) for name, norm in norms.items()}
        total = _together(norms.values())
        passed = _together(term for term in terms.values() if math.isfinite(term))
        steps = min(unit, UNIT_OF_SUMS) * (1 + math.sqrt(num_micro_batches))
        found = []
        for name, norm in norms.items():
            scale = max(norm, SMALLEST_SCALE * total)
            floor = SAFETY * self.spread.get(name, 0.0) + 2 * unit * terms[name] + steps * (2 * terms[name] + passed)
            floor *= FLOAT64_FACTOR if unit < 1e-12 else 1.0
            floor = floor if self.is_widened else min(floor, largest_floor(unit) * passed)
            error = distances[name] if math.isfinite(distances[name]) else math.inf
            if scale:
                found.append(ParameterDeviation(name=name, error=error / scale, floor=floor / scale))
            else:  # the gradient should be zero: anything beyond rounding is wrong
                found.append(ParameterDeviation(name=name, error=0.0 if error <= floor else math.inf, floor=0.0))
        return tuple(found)


def floor_of(whole: Gradient, others: Sequence[Gradient], unit: float) -> Floor:
    """Return the floor of `whole`, given the same gradient computed in other ways."""
    near = [whole.distances(other) for other in others if relative(whole, other) <= largest_floor(unit)]
    spread = {name: max((distances[name] for distances in near), default=0.0) for name in whole.parameters}
    return Floor(whole=whole, spread=spread, unit=unit)


def largest_floor(unit: float) -> float:
    """Return the largest floor as a share of |all|: 1e-10 in float64, 1e-4 in fp32, 0.2 in bf16."""
    return max(LEAST_BOUND, min(MOST_ROUNDOFFS * unit, 0.2))


def relative(whole: Gradient, other: Gradient) -> float:
    """Return |other - whole| / |whole| over all parameters; 0 if both are zero."""
    apart = _together(whole.distances(other).values())
    if apart == 0:
        return 0.0
    scale = max(_together(whole.norms.values()), SMALLEST_SCALE * _together(other.terms.values()))
    return apart / scale if scale and math.isfinite(apart) else math.inf


def add_norm(terms: dict[str, Tensor], name: str, grad: Tensor) -> None:
    """Add the norm of one micro-batch's gradient; a hook of the parameter."""
    norm = _norm(_pieces(grad.detach().coalesce().values() if grad.is_sparse else grad.detach()))
    terms[name] = terms[name] + norm if name in terms else norm


def gradients_of(named: Mapping[str, nn.Parameter]) -> dict[str, Tensor | None]:
    return {name: None if held.grad is None else held.grad.detach().to_dense() for name, held in named.items()}


def _together(norms: Iterable[float]) -> float:
    return math.sqrt(sum(norm**2 for norm in norms))


def _norm_of(grad: Tensor | None) -> float:
    return 0.0 if grad is None else float(_norm(_pieces(grad)))


def _distance(one: Tensor | None, other: Tensor | None) -> float:
    if one is None or other is None:
        return _norm_of(one if other is None else other)
    pairs = zip(_pieces(one.detach()), _pieces(other.detach()), strict=True)
    return float(_norm(mine.double() - others.to(one.device, torch.float64) for mine, others in pairs))


def _pieces(values: Tensor) -> tuple[Tensor, ...]:
    """Split into at most 64 pieces of at least 2,048 numbers: a float64 copy of a whole gradient would double its memory."""
    flat = values.flatten()
    return tuple(flat.split(max(2_048, -(-flat.numel() // 64))))


def _norm(pieces: Iterable[Tensor]) -> Tensor:
    norms = [torch.linalg.vector_norm(piece, dtype=torch.float64) for piece in pieces]
    total: Tensor = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    return total

"""The floor: how far two ways to add up the same numbers may lie apart, and the error that is held against it.

Floating-point sums depend on their order, and nothing says how much but a measurement. For each parameter

    floor = [ 6 max(|permuted - whole|, |whole - float64|)  +  2 u |terms|  +  v (1 + sqrt(K)) (2 |terms| + |all|) ] / scale

`permuted` is the whole batch in one go with its rows in another order: the same sum, added otherwise, by plain torch. `float64`
is the whole batch in float64, where this is another precision. u is the unit roundoff of the precision, to which every gradient
is rounded once; v that of the sums, which are fp32 for bf16 and fp16. Each of the K additions rounds by v, and roundings add
up as a random walk does. |terms| is the sum of the norms of what micro-batches add: near a minimum they cancel, and what
rounding leaves is in proportion to them, not to their sum. |all| is that of all parameters together: where a parameter's own
gradient is zero but for rounding (the bias of attention's keys, of a layer before BatchNorm), what is left over is in
proportion to what passed through.

In float64 all of it counts 32 times: a cut changes the shapes that kernels sum over, which permuting does not, and there is no
finer precision to see that by; while no mistake is as small as 1e-12. Over 17 sound models, 6 seeds each, the error was at most
0.28 of the floor, without these 32 times.

So that noise in the model cannot hide behind a large floor, it is at most `largest_floor(u)` of |all|. Errors and floors are
relative to `scale`, the norm of the parameter's gradient, or a millionth of |all| where that is larger.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

SAFETY = 6.0
"""One or two permutations are a small sample of all orders of adding up."""
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
    """How far the accumulated gradient of one parameter is from the whole batch's."""

    name: str
    error: float
    """|accumulated - whole| / |whole|"""
    floor: float
    """Largest error that the order of summation explains."""

    @property
    def is_exact(self) -> bool:
        return self.error <= self.floor


ParameterError = ParameterDeviation
"""The name up to version 0.2. It is no exception."""


@dataclass(frozen=True, slots=True)
class Gradient:
    """Loss and gradients of one run, by parameter; None if the run did not touch one."""

    loss: float
    parameters: Mapping[str, Tensor | None]
    terms: Mapping[str, float] = field(default_factory=dict)
    """Sum of the norms of what micro-batches added, by parameter; empty for a run in one go."""

    @property
    def norm(self) -> float:
        return _together(self.norms.values())

    @property
    def norms(self) -> dict[str, float]:
        return {name: _norm_of(grad) for name, grad in self.parameters.items()}

    def distances(self, other: "Gradient") -> dict[str, float]:
        """How far each parameter's gradient is from that of another run."""
        return {name: _distance(grad, other.parameters[name]) for name, grad in self.parameters.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """The whole batch's gradient in one precision, and how well it is known."""

    whole: Gradient
    spread: dict[str, float]
    """How far other orders, and float64, are from it."""
    unit: float
    """The unit roundoff."""
    is_widened: bool = False
    """True if `spread` includes the effect of rounding the parameters, and is not bounded."""

    def widened(self, perturbed: Gradient) -> "Floor":
        """The floor that takes in what the gradient becomes where every parameter is rounded otherwise.

        Where the terms of a loss cancel (targets that are met, a minimum), a gradient is made of rounding, and so is its error.
        """
        distances = self.whole.distances(perturbed)
        spread = {name: max(self.spread[name], apart) for name, apart in distances.items()}
        return replace(self, spread=spread, is_widened=True)

    def errors(self, accumulated: Gradient, num_micro_batches: int) -> tuple[ParameterDeviation, ...]:
        """The error of each parameter, and its floor for so many micro-batches."""
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
            else:  # a gradient of zero: what is there beyond rounding is all wrong
                found.append(ParameterDeviation(name=name, error=0.0 if error <= floor else math.inf, floor=0.0))
        return tuple(found)


def floor_of(whole: Gradient, others: Sequence[Gradient], unit: float) -> Floor:
    """The floor of `whole`, given the same gradient computed in other ways."""
    near = [whole.distances(other) for other in others if relative(whole, other) <= largest_floor(unit)]
    spread = {name: max((distances[name] for distances in near), default=0.0) for name in whole.parameters}
    return Floor(whole=whole, spread=spread, unit=unit)


def largest_floor(unit: float) -> float:
    """The largest floor, as a share of all gradients: 1e-10 in float64, 1e-4 in fp32, a fifth in bf16."""
    return max(LEAST_BOUND, min(MOST_ROUNDOFFS * unit, 0.2))


def relative(whole: Gradient, other: Gradient) -> float:
    """|other - whole| / |whole| over all parameters; 0 where both are zero."""
    apart = _together(whole.distances(other).values())
    if apart == 0:
        return 0.0
    scale = max(whole.norm, SMALLEST_SCALE * _together(other.terms.values()))
    return apart / scale if scale and math.isfinite(apart) else math.inf


def add_norm(terms: dict[str, Tensor], name: str, grad: Tensor) -> None:
    """Add the norm of what one micro-batch adds to a parameter's gradient: a hook."""
    norm = _norm_in_pieces(grad.detach().coalesce().values() if grad.is_sparse else grad.detach())
    terms[name] = terms[name] + norm if name in terms else norm


def gradients_of(named: Mapping[str, nn.Parameter]) -> dict[str, Tensor | None]:
    """The dense `.grad` of each parameter, by name."""
    return {name: None if held.grad is None else held.grad.detach().to_dense() for name, held in named.items()}


def _together(norms: Iterable[float]) -> float:
    return math.sqrt(sum(norm**2 for norm in norms))


def _norm_of(grad: Tensor | None) -> float:
    return 0.0 if grad is None else float(_norm_in_pieces(grad))


def _distance(one: Tensor | None, other: Tensor | None) -> float:
    if one is None or other is None:
        return _norm_of(one if other is None else other)
    flat, others = one.detach().flatten(), other.detach().flatten()
    pieces = _pieces(flat.numel())
    return float(
        _joined([_norm(flat[piece].double() - others[piece].to(one.device, torch.float64)) for piece in pieces])
    )


def _norm_in_pieces(values: Tensor) -> Tensor:
    """The float64 norm, piece by piece: a float64 copy of a whole gradient takes twice its memory."""
    flat = values.flatten()
    return _joined([_norm(flat[piece]) for piece in _pieces(flat.numel())])


def _pieces(numel: int) -> Iterator[slice]:
    """Slice so many numbers into 64 pieces at most, of 2,048 numbers at least."""
    step = max(2_048, -(-numel // 64))
    return (slice(start, min(start + step, numel)) for start in range(0, numel, step))


def _joined(norms: list[Tensor]) -> Tensor:
    if len(norms) == 1:
        return norms[0]
    return _norm(torch.stack(norms)) if norms else torch.zeros((), dtype=torch.float64)


def _norm(values: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(values, dtype=torch.float64)
    return norm

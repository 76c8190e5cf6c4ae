"""Passes and updates of a training loop as values, and the weight of each micro-batch in its update."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from anybatch.doctor.finding import Spot
from anybatch.doctor.log import CRITERIA

Probe = Mapping[str, tuple[float, ...]]
"""A few elements of a few gradients, by parameter."""
SAME = 0.02
"""Relative difference below which two weights are equal: rounding and half precision."""
BY_HAND = 0.05
"""Relative residual, after scaling what backward produced, above which a gradient was written by hand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerm:
    """One mean or sum within a loss, and the weight that backward gave it."""

    role: str
    kind: str  # mean, sum or opaque
    weight: float
    counts: tuple[float, ...]  # terms that it reduced; several candidates for a sum
    pairs: int = 0  # rows of a square of logits with each row as target once: a contrastive loss


@dataclass(frozen=True, slots=True, kw_only=True)
class LossPass:
    """One call of backward."""

    serial: int
    index: int  # position in the log
    seconds: float
    spot: Spot
    loss: float | None
    terms: tuple[LossTerm, ...]
    touched: frozenset[int]
    batch: tuple[int, int, int] | None  # loader, epoch and number of the batch fetched last
    rows: int | None
    mark: float | None  # checksum of the batch, on several ranks only
    scale: float | None
    sync: tuple[bool, bool] | None  # flag for gradient synchronisation, at forward and at backward
    probe: Probe = field(repr=False)
    is_retained: bool = False
    is_eval: bool = False
    dtypes: tuple[str, ...] = ()
    norms: Mapping[str, Any] | None = None
    norm_forwards: int = 0


MicroBatchPasses = tuple[LossPass, ...]
"""The backward passes of one micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """Any other event between passes and steps: clip, schedule, unscale, scaler-update, zero, cleared, modified."""

    kind: str
    index: int
    seconds: float
    spot: Spot
    parameters: frozenset[int] = frozenset()
    facts: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class LostPass:
    """A pass that no step used."""

    loss_pass: LossPass
    spot: Spot  # the line that cleared it, or that of the pass if it was left at the end
    index: int
    is_left: bool


@dataclass(frozen=True, kw_only=True)
class LoopUpdate:
    """One step of one optimizer, and the passes it used."""

    number: int  # 1 for the first of this optimizer
    optimizer: int
    index: int
    seconds: float
    spot: Spot
    passes: tuple[LossPass, ...]  # in the gradients for the first time
    stale: tuple[int, ...]  # passes that an earlier step used and that were not cleared
    actions: tuple[Action, ...]  # since the optimizer's previous step
    lr: tuple[float, ...]
    probe: Probe = field(repr=False)
    is_assigned: bool = False  # gradients were written other than by backward, clipping and unscaling
    is_in_scaler: bool = False
    is_empty: bool = False  # no parameter had a gradient

    @cached_property
    def micro_batches(self) -> tuple[MicroBatchPasses, ...]:
        """Passes grouped by micro-batch: several losses of one forward are one micro-batch."""
        counts = Counter(one.spot.chain for one in self.passes)
        found: list[list[LossPass]] = []
        for one in self.passes:
            if not found or _begins_micro_batch(one, found[-1], counts):
                found.append([one])
            else:
                found[-1].append(one)
        return tuple(map(tuple, found))

    @cached_property
    def weighing(self) -> "Weighing | None":
        """Weights of the micro-batches; None if no loss could be read or the gradients were written by hand."""
        return _weigh(self)

    @property
    def is_whole(self) -> bool:
        """True if the weights add up to 1, so that this size of the update is intended."""
        return self.weighing is not None and near(self.weighing.total, 1.0)

    @property
    def first_spot(self) -> Spot:
        return self.passes[0].spot if self.passes else Spot()

    @property
    def spans_epochs(self) -> bool:
        """True if it has passes of two epochs of one loader."""
        epochs = {one.batch[:2] for one in self.passes if one.batch is not None}
        return len(epochs) > len({loader for loader, _ in epochs})

    def is_between(self, index: int) -> bool:
        """Return True if a position in the log lies after the first micro-batch and before the last."""
        parts = self.micro_batches
        return len(parts) > 1 and parts[0][-1].index < index < parts[-1][0].index


def _begins_micro_batch(one: LossPass, passes: list[LossPass], counts: Counter[str]) -> bool:
    last = passes[-1]
    if one.batch is not None and last.batch is not None and one.batch != last.batch:
        return True
    if last.is_retained and one.batch == last.batch:
        return False
    if any((one.spot.chain, one.touched) == (other.spot.chain, other.touched) for other in passes):
        return True
    is_unrolled = counts[one.spot.chain] == 1 and counts[last.spot.chain] > 1 and one.touched == last.touched
    return is_unrolled and [t.role for t in one.terms] == [t.role for t in last.terms]


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighing:
    """Weights of the main loss of an update, by micro-batch."""

    role: str
    kind: str
    shares: tuple[float, ...]  # weight of each micro-batch; they add up to 1 if the update is one batch's mean
    counts: tuple[float, ...]  # terms of each micro-batch
    ratio: float  # factor applied to `.grad` by hand
    all_terms: float = 0.0  # sum of the weights of all readable losses
    num_terms: int = 1  # losses added up; with several, a factor may be intended

    @property
    def total(self) -> float:
        return math.fsum(self.shares)

    @property
    def per_term(self) -> tuple[float, ...]:
        """Weight of one term of each micro-batch."""
        return tuple(share / count if count else 0.0 for share, count in zip(self.shares, self.counts, strict=True))

    @property
    def is_constant(self) -> bool:
        """True if all micro-batches have the same weight."""
        return all(near(share, self.shares[0]) for share in self.shares)

    @property
    def is_plain_sum(self) -> bool:
        """True for a sum over terms of weight 1 each, which is intended."""
        return self.kind == "sum" and all(near(each, 1.0) for each in self.per_term)

    @property
    def is_equal_by_term(self) -> bool:
        counted = [each for each, count in zip(self.per_term, self.counts, strict=True) if count]
        return not counted or max(counted) - min(counted) <= SAME * max(map(abs, counted))


def near(one: float, other: float) -> bool:
    return abs(one - other) <= SAME * max(abs(one), abs(other))


def _weigh(update: LoopUpdate) -> Weighing | None:
    """Choose the main loss: one of torch's criteria before other means, then the largest weight."""
    parts = update.micro_batches
    ratio = factor_by_hand(update)
    if not parts or ratio is None:
        return None
    terms_of = [_terms_by_role(passes) for passes in parts]
    common = [key for key in terms_of[0] if all(key in terms for terms in terms_of)]
    readable = [key for key in common if all(terms[key].kind != "opaque" and terms[key].counts for terms in terms_of)]
    if not readable:
        return None
    best = max(readable, key=lambda key: (key[1].startswith(CRITERIA), abs(_share(terms_of[0][key], 0))))
    scales = [passes[0].scale or 1.0 for passes in parts]
    alike = [key for key in readable if key[:2] == best[:2]]
    first = [terms_of[0][key] for key in alike]
    is_perhaps_one_mean = all(term.kind == "mean" and near(term.weight, first[0].weight) for term in first)
    choices = []
    for keys in {(best,), tuple(alike)} if is_perhaps_one_mean else {(best,)}:
        merged = [_merged([terms[key] for key in keys]) for terms in terms_of]
        for way in range(min(len(term.counts) for term in merged) if merged[0].kind == "sum" else 1):
            shares = (_share(term, way) / scale * ratio for term, scale in zip(merged, scales, strict=True))
            choices.append(
                Weighing(
                    role=best[1],
                    kind=merged[0].kind,
                    shares=tuple(shares),
                    counts=tuple(term.counts[way] for term in merged),
                    ratio=ratio,
                    num_terms=len(common),
                )
            )
    every = math.fsum(
        _share(terms[key], -1) / scale for terms, scale in zip(terms_of, scales, strict=True) for key in readable
    )
    return replace(min(choices, key=_distance), all_terms=every * ratio)


def _terms_by_role(passes: MicroBatchPasses) -> dict[tuple[int, str, int], LossTerm]:
    """Return terms by pass within the micro-batch, role, and number among those of that role."""
    found: dict[tuple[int, str, int], LossTerm] = {}
    for place, one in enumerate(passes):
        seen: Counter[str] = Counter()
        for term in one.terms:
            found[place, term.role, seen[term.role]] = term
            seen[term.role] += 1
    return found


def _merged(terms: Sequence[LossTerm]) -> LossTerm:
    if len(terms) == 1:
        return terms[0]
    counts = (math.fsum(term.counts[0] for term in terms),)
    return LossTerm(role=terms[0].role, kind="mean", weight=math.fsum(term.weight for term in terms), counts=counts)


def _share(term: LossTerm, way: int) -> float:
    return term.weight if term.kind != "sum" else term.weight * (term.counts[way] if term.counts else 1.0)


def _distance(one: Weighing) -> float:
    """Return the distance to one batch's mean, or to a forgotten division; it chooses how a sum is counted."""
    total = abs(one.total)
    if not total or one.is_plain_sum:
        return 0.0
    return min(abs(math.log(total)), abs(math.log(total / len(one.shares))) + 0.1)


def factor_by_hand(update: LoopUpdate) -> float | None:
    """Return the factor on the gradients besides clipping and unscaling; None if they are no multiple of backward's."""
    if not update.is_assigned:
        return 1.0
    if update.stale or any(one.sync is not None for one in update.passes):
        return None
    arrived = _sum([(one.probe, 1.0 / (one.scale or 1.0)) for one in update.passes])
    pairs = [
        pair for key in arrived if key in update.probe for pair in zip(arrived[key], update.probe[key], strict=True)
    ]
    squared = math.fsum(a * a for a, _ in pairs)
    if not squared:
        return None
    ratio = math.fsum(a * b for a, b in pairs) / squared
    size = math.sqrt(math.fsum(b * b for _, b in pairs))
    rest = math.sqrt(math.fsum((b - ratio * a) ** 2 for a, b in pairs))
    return None if not size or rest > BY_HAND * size else ratio / _clip_factor(update)


def _clip_factor(update: LoopUpdate) -> float:
    """Return the factor by which clipping after the last pass shrank the gradients."""
    last = update.passes[-1].index if update.passes else -1
    factor = 1.0
    for one in update.actions:
        norm, limit = one.facts.get("norm"), one.facts.get("limit")
        if one.kind == "clip" and one.index > last and norm and limit and norm > limit:
            factor *= limit / norm
    return factor


def _sum(parts: Sequence[tuple[Probe, float]]) -> dict[str, list[float]]:
    total: dict[str, list[float]] = {}
    for probe, factor in parts:
        for key, values in probe.items():
            row = total.setdefault(key, [0.0] * len(values))
            total[key] = [before + factor * value for before, value in zip(row, values, strict=True)]
    return total


def gradient_error(update: LoopUpdate, weighing: Weighing) -> float | None:
    """Return |gradient of the step - gradient of one batch| / |gradient of one batch| on the probed elements."""
    units = math.fsum(weighing.counts)
    if not units or not all(weighing.shares) or any(len(passes) != 1 for passes in update.micro_batches):
        return None
    arrived = [(passes[0].probe, weighing.ratio / (passes[0].scale or 1.0)) for passes in update.micro_batches]
    got = _sum(arrived)
    parts = zip(arrived, weighing.shares, weighing.counts, strict=True)
    right = _sum([(probe, factor / share * count / units) for (probe, factor), share, count in parts])
    difference = math.fsum((a - b) ** 2 for key in right for a, b in zip(got[key], right[key], strict=True))
    size = math.fsum(value * value for row in right.values() for value in row)
    return math.sqrt(difference / size) if size else None

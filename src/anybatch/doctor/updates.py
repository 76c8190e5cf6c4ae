"""Passes and updates of a training loop as values, and the weight of each micro-batch in its update."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from anybatch.doctor.finding import Spot

CRITERIA = (
    *("NllLoss", "MseLoss", "BinaryCrossEntropy", "SmoothL1Loss", "HuberLoss", "SoftMarginLoss"),
    *("MultiMarginLoss", "MultilabelMarginLoss", "CtcLoss", "KlDiv"),
)
"""How the names of torch's autograd nodes begin that reduce a loss over its terms themselves."""
Probe = Mapping[str, tuple[float, ...]]
"""Some numbers of some gradients, by parameter."""
SAME = 0.02
"""Relative difference below which two weights are the same."""
BY_HAND = 0.05
"""Part of a gradient that no multiple of what backward brought explains, above which it was made by hand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerm:
    """One mean or sum within a loss, and the weight that backward gave it."""

    role: str
    kind: str
    weight: float
    counts: tuple[float, ...]
    """How many terms it took together; several where a sum may be counted in several ways."""
    pairs: int = 0
    """Rows of a square of logits whose targets are each row once: a contrastive loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossPass:
    """One call of backward."""

    serial: int
    index: int
    """Its place in the log."""
    seconds: float
    spot: Spot
    loss: float | None
    terms: tuple[LossTerm, ...]
    touched: frozenset[int]
    batch: tuple[int, int, int] | None
    """Loader, epoch and number of the batch that was fetched last."""
    rows: int | None
    mark: float | None
    """A number that tells the rows of one batch from those of another; of many ranks only."""
    scale: float | None
    sync: tuple[bool, bool] | None
    """Whether ranks were to synchronise, as it stood at forward and at backward."""
    probe: Probe = field(repr=False)
    is_retained: bool = False
    is_eval: bool = False
    dtypes: tuple[str, ...] = ()
    norms: Mapping[str, Any] | None = None
    norm_forwards: int = 0


MicroBatchPasses = tuple[LossPass, ...]
"""The backward passes of one micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """Anything that is neither a pass nor a step: clip, schedule, unscale, scaler-update, zero, cleared, modified."""

    kind: str
    index: int
    seconds: float
    spot: Spot
    parameters: frozenset[int] = frozenset()
    facts: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, kw_only=True)
class LoopUpdate:
    """One step of one optimizer, and what it was made of."""

    number: int
    """1 for the first of this optimizer."""
    optimizer: int
    index: int
    seconds: float
    spot: Spot
    passes: tuple[LossPass, ...]
    """In the gradients for the first time."""
    stale: tuple[int, ...]
    """Passes that were stepped on before, and never cleared."""
    happenings: tuple[Happening, ...]
    """Since the step before of this optimizer."""
    lr: tuple[float, ...]
    probe: Probe = field(repr=False)
    is_assigned: bool = False
    """Somebody wrote to the gradients other than backward, clipping and unscaling."""
    is_in_scaler: bool = False
    is_empty: bool = False
    """No parameter had a gradient."""

    @cached_property
    def micro_batches(self) -> tuple[MicroBatchPasses, ...]:
        """Passes put together by micro-batch: several losses of one forward are one micro-batch."""
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
        """Weights of the micro-batches; None where no loss could be read, or where the gradients were made by hand."""
        return _weigh(self)

    @property
    def is_whole(self) -> bool:
        """The weights add up to 1: whatever the size of the update is, it is meant so."""
        return self.weighing is not None and near(self.weighing.total, 1.0)

    @property
    def first_spot(self) -> Spot:
        """Line of the first pass."""
        return self.passes[0].spot if self.passes else Spot()

    @property
    def spans_epochs(self) -> bool:
        """True if it has passes of two epochs of one loader."""
        epochs = {one.batch[:2] for one in self.passes if one.batch is not None}
        return len(epochs) > len({loader for loader, _ in epochs})

    def is_between(self, index: int) -> bool:
        """True of a place in the log after the first micro-batch and before the last."""
        parts = self.micro_batches
        return len(parts) > 1 and parts[0][-1].index < index < parts[-1][0].index


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A pass that no step ever used."""

    loss_pass: LossPass
    spot: Spot
    """The line that cleared it; that of the pass where it was left at the end."""
    index: int
    is_left: bool


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
    """The main loss of an update, micro-batch by micro-batch."""

    role: str
    kind: str
    shares: tuple[float, ...]
    """Weight of each micro-batch; they add up to 1 where the update is one batch's mean."""
    counts: tuple[float, ...]
    """Terms of each."""
    ratio: float
    """Factor that `.grad` was multiplied with by hand."""
    all_terms: float = 0.0
    """Sum of the weights of all readable losses."""
    num_terms: int = 1
    """Losses that were added up; with several, a factor may be meant."""

    @property
    def total(self) -> float:
        """Sum of the weights."""
        return math.fsum(self.shares)

    @property
    def per_term(self) -> tuple[float, ...]:
        """Weight of one term of each micro-batch."""
        return tuple(share / count if count else 0.0 for share, count in zip(self.shares, self.counts, strict=True))

    @property
    def is_plain_sum(self) -> bool:
        """Every term with weight 1: a sum that was meant as one."""
        return self.kind == "sum" and all(near(each, 1.0) for each in self.per_term)

    @property
    def is_equal_by_term(self) -> bool:
        """Every term counted for the same."""
        counted = [each for each, count in zip(self.per_term, self.counts, strict=True) if count]
        return not counted or max(counted) - min(counted) <= SAME * max(map(abs, counted))


def near(one: float, other: float) -> bool:
    """The same up to rounding and half precision."""
    return abs(one - other) <= SAME * max(abs(one), abs(other))


def _weigh(update: LoopUpdate) -> Weighing | None:
    parts = update.micro_batches
    ratio = ratio_by_hand(update)
    if not parts or ratio is None:
        return None
    roles = [_roles(passes) for passes in parts]
    common = [key for key in roles[0] if all(key in found for found in roles)]
    readable = [key for key in common if all(found[key].kind != "opaque" and found[key].counts for found in roles)]
    if not readable:
        return None
    best = max(readable, key=lambda key: (key[1].startswith(CRITERIA), abs(_share(roles[0][key], 0))))
    scales = [passes[0].scale or 1.0 for passes in parts]
    together = [key for key in readable if key[:2] == best[:2]]
    first = [roles[0][key] for key in together]
    is_perhaps_one_mean = all(term.kind == "mean" and near(term.weight, first[0].weight) for term in first)
    choices = []
    for keys in {(best,), tuple(together)} if is_perhaps_one_mean else {(best,)}:
        terms = [_merged([found[key] for key in keys]) for found in roles]
        ways = min(len(term.counts) for term in terms) if terms[0].kind == "sum" else 1
        for way in range(ways):
            shares = (_share(term, way) / scale * ratio for term, scale in zip(terms, scales, strict=True))
            choices.append(
                Weighing(
                    role=best[1],
                    kind=terms[0].kind,
                    shares=tuple(shares),
                    counts=tuple(term.counts[way] for term in terms),
                    ratio=ratio,
                    num_terms=len(common),
                )
            )
    whole = math.fsum(
        _share(found[key], -1) / scale for found, scale in zip(roles, scales, strict=True) for key in readable
    )
    return replace(min(choices, key=_distance), all_terms=whole * ratio)


def _merged(terms: Sequence[LossTerm]) -> LossTerm:
    if len(terms) == 1:
        return terms[0]
    counts = (math.fsum(term.counts[0] for term in terms),)
    return LossTerm(role=terms[0].role, kind="mean", weight=math.fsum(term.weight for term in terms), counts=counts)


def _distance(one: Weighing) -> float:
    """How far from one batch's mean, or from a forgotten division: sums may be counted in several ways."""
    total = abs(one.total)
    if not total or one.is_plain_sum:
        return 0.0
    return min(abs(math.log(total)), abs(math.log(total / len(one.shares))) + 0.1)


def _share(term: LossTerm, choice: int) -> float:
    return term.weight if term.kind != "sum" else term.weight * (term.counts[choice] if term.counts else 1.0)


def _roles(passes: MicroBatchPasses) -> dict[tuple[int, str, int], LossTerm]:
    """Terms by pass within the micro-batch, role, and number among those of that role."""
    found: dict[tuple[int, str, int], LossTerm] = {}
    for place, one in enumerate(passes):
        seen: Counter[str] = Counter()
        for term in one.terms:
            found[place, term.role, seen[term.role]] = term
            seen[term.role] += 1
    return found


def ratio_by_hand(update: LoopUpdate) -> float | None:
    """Factor on the gradients besides clipping and unscaling; None where they are no multiple of what backward brought."""
    if not update.is_assigned:
        return 1.0
    if update.stale or any(one.sync is not None for one in update.passes):
        return None
    arrived = _sum([(one.probe, 1.0 / (one.scale or 1.0)) for one in update.passes])
    keys = [key for key in arrived if key in update.probe]
    one = [value for key in keys for value in arrived[key]]
    other = [value for key in keys for value in update.probe[key]]
    squared = math.fsum(value * value for value in one)
    if not squared:
        return None
    ratio = math.fsum(a * b for a, b in zip(one, other, strict=True)) / squared
    size = math.sqrt(math.fsum(value * value for value in other))
    rest = math.sqrt(math.fsum((b - ratio * a) ** 2 for a, b in zip(one, other, strict=True)))
    if not size or rest > BY_HAND * size:
        return None
    return ratio / _clip_factor(update)


def _clip_factor(update: LoopUpdate) -> float:
    """By how much clipping made the gradients smaller, after the last pass."""
    last = update.passes[-1].index if update.passes else -1
    factor = 1.0
    for one in update.happenings:
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
    """|what the step got - what one batch would give| / |what one batch would give|, on the probed numbers."""
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

"""What each micro-batch counted for in an update: its weight, its terms, and the gradient that one batch would have given."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from anybatch.doctor.loops.loop_facts import CRITERIA, LoopUpdate, LossPass, LossTerm, Probe

SAME = 0.02
"""Relative difference below which two weights are the same."""
BY_HAND = 0.05
"""Part of a gradient that no multiple of what backward brought explains, above which it was made by hand."""

Lane = tuple[LossPass, ...]
"""The backward passes of one micro-batch."""


def lanes_of(passes: Sequence[LossPass]) -> tuple[Lane, ...]:
    """Passes put together by micro-batch: several losses of one forward are one micro-batch."""
    counts = Counter(one.spot.chain for one in passes)
    lanes: list[list[LossPass]] = []
    for one in passes:
        if not lanes or _begins_a_lane(one, lanes[-1], counts):
            lanes.append([one])
        else:
            lanes[-1].append(one)
    return tuple(tuple(lane) for lane in lanes)


def _begins_a_lane(one: LossPass, lane: list[LossPass], counts: Counter[str]) -> bool:
    last = lane[-1]
    if one.batch is not None and last.batch is not None and one.batch != last.batch:
        return True
    if last.is_retained and one.batch == last.batch:
        return False
    if any((one.spot.chain, one.touched) == (other.spot.chain, other.touched) for other in lane):
        return True
    is_unrolled = counts[one.spot.chain] == 1 and counts[last.spot.chain] > 1 and one.touched == last.touched
    return is_unrolled and [t.role for t in one.terms] == [t.role for t in last.terms]


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighing:
    """The main loss of an update, micro-batch by micro-batch."""

    role: str
    kind: str
    shares: tuple[float, ...]
    """What each micro-batch counted for; they add up to 1 where the update is one batch's mean."""
    counts: tuple[float, ...]
    """Terms of each."""
    ratio: float
    """What `.grad` was multiplied with by hand."""
    all_terms: float = 0.0
    """What all readable losses together add up to."""
    num_terms: int = 1
    """Losses that were added up; with several, a factor may be meant."""

    @property
    def total(self) -> float:
        """Of all shares."""
        return math.fsum(self.shares)

    @property
    def per_term(self) -> tuple[float, ...]:
        """What one term of each micro-batch counted for."""
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


def weigh(update: LoopUpdate) -> Weighing | None:
    """The weights of an update; None where no loss could be read, or where the gradients were made by hand."""
    lanes = lanes_of(update.passes)
    ratio = ratio_by_hand(update)
    if not lanes or ratio is None:
        return None
    roles = [_roles(lane) for lane in lanes]
    common = [key for key in roles[0] if all(key in found for found in roles)]
    readable = [key for key in common if all(found[key].kind != "opaque" and found[key].counts for found in roles)]
    if not readable:
        return None
    best = max(readable, key=lambda key: (key[1].startswith(CRITERIA), abs(_share(roles[0][key], 0))))
    scales = [lane[0].scale or 1.0 for lane in lanes]
    together = [key for key in readable if key[:2] == best[:2]]
    choices = []
    for keys in {(best,), tuple(together)} if _are_equal([roles[0][key] for key in together]) else {(best,)}:
        terms = [_merged([found[key] for key in keys]) for found in roles]
        ways = min(len(term.counts) for term in terms) if terms[0].kind == "sum" else 1
        choices += [_weighing(best[1], terms, scales, ratio, way, len(common)) for way in range(ways)]
    whole = math.fsum(
        _share(found[key], -1) / scale for found, scale in zip(roles, scales, strict=True) for key in readable
    )
    return replace(min(choices, key=_distance), all_terms=whole * ratio)


def _are_equal(terms: Sequence[LossTerm]) -> bool:
    """Means of the same kind and weight: perhaps one mean of them all."""
    return all(term.kind == "mean" and near(term.weight, terms[0].weight) for term in terms)


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


def _weighing(
    role: str, terms: Sequence[LossTerm], scales: Sequence[float], ratio: float, choice: int, num_terms: int
) -> Weighing:
    shares = tuple(_share(term, choice) / scale * ratio for term, scale in zip(terms, scales, strict=True))
    counts = tuple(term.counts[choice] for term in terms)
    return Weighing(role=role, kind=terms[0].kind, shares=shares, counts=counts, ratio=ratio, num_terms=num_terms)


def _share(term: LossTerm, choice: int) -> float:
    return term.weight if term.kind != "sum" else term.weight * (term.counts[choice] if term.counts else 1.0)


def _roles(lane: Lane) -> dict[tuple[int, str, int], LossTerm]:
    """Terms by pass within the lane, role, and number among those of that role; repeats of a mean over all count once."""
    found: dict[tuple[int, str, int], LossTerm] = {}
    for place, one in enumerate(lane):
        seen: Counter[str] = Counter()
        for term in one.terms:
            found[place, term.role, seen[term.role]] = term
            seen[term.role] += 1
    return found


def ratio_by_hand(update: LoopUpdate) -> float | None:
    """What the gradients were multiplied with besides clipping and unscaling; None where they are no multiple of what came."""
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
    return ratio / clip_factor(update)


def clip_factor(update: LoopUpdate) -> float:
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
    lanes = lanes_of(update.passes)
    units = math.fsum(weighing.counts)
    if not units or any(not share for share in weighing.shares) or any(len(lane) != 1 for lane in lanes):
        return None
    scales = [lane[0].scale or 1.0 for lane in lanes]
    got = _sum([(lane[0].probe, weighing.ratio / scale) for lane, scale in zip(lanes, scales, strict=True)])
    triples = zip(lanes, scales, weighing.shares, weighing.counts, strict=True)
    factors = [(lane[0].probe, weighing.ratio / scale / share * count / units) for lane, scale, share, count in triples]
    right = _sum(factors)
    difference = math.fsum((a - b) ** 2 for key in right for a, b in zip(got[key], right[key], strict=True))
    size = math.fsum(value * value for row in right.values() for value in row)
    return math.sqrt(difference / size) if size else None

"""Finding the fastest of many sizes in a dozen measurements, each of which is an update of real training."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

LIMIT = 12
"""The search ends after this many measurements."""
CLEARLY = 0.85
"""A rate below this share of the best, beyond the noise of a shared machine, ends the way up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One size and the rates it was seen to give."""

    size: int
    rates: tuple[float, ...]

    @property
    def rate(self) -> float:
        """Their mean: the best of several would favour the lucky."""
        return sum(self.rates) / len(self.rates)


class Search:
    """The way up in steps of 4, then ever smaller steps around the best, then other gaps, then the best two again in turn.

    `sizes` ascend; the rate is taken to rise to a summit and to fall after it. `next_size` is the size to measure next
    and `tell` takes its rate. From the end of the search on, `next_size` is the best. Going up from the smallest, no size is
    tried that is far above the best one: what would not fit is not met by accident.
    """

    def __init__(self, sizes: Sequence[int], *, limit: int = LIMIT, stride: int = 4) -> None:
        self.sizes = tuple(sizes)
        self._rates: dict[int, list[float]] = {}
        self._limit = limit
        self._stride = stride
        self._is_climbing = True
        self._at = 0
        self._highest = self._top = len(self.sizes) - 1
        self.num_measured = 0
        self.is_done = False
        """True when nothing is left to try."""
        self._decide()

    @property
    def next_size(self) -> int:
        """The size to run the next batch with."""
        return self.sizes[self._at]

    @property
    def best(self) -> int:
        """The fastest size so far; the smallest before the first measurement."""
        return self.sizes[self._best()]

    @property
    def trials(self) -> tuple[Trial, ...]:
        """What was tried, by size."""
        return tuple(Trial(size=self.sizes[at], rates=tuple(self._rates[at])) for at in sorted(self._rates))

    @property
    def bound(self) -> int:
        """The largest size that may be come to."""
        return self.sizes[self._highest]

    def tell(self, rate: float) -> None:
        """The rate that `next_size` gave."""
        if self.is_done:
            return
        self._rates.setdefault(self._at, []).append(rate)
        self.num_measured += 1
        self._decide()

    def cap(self, size: int) -> None:
        """Sizes above the first that reaches `size` make no difference: leave them out."""
        reaching = (at for at, known in enumerate(self.sizes) if known >= size)
        self._top = min(next(reaching, self._highest), self._highest)
        if not self.is_done and not self._rates.get(self._at):
            self._at = min(self._at, self._top)

    def limit(self, size: int) -> bool:
        """Sizes above `size` do not fit: never come to them, or back to them. False, and no change, where all are above.

        What was measured of them is void; where that leaves a gap below `size`, the way up goes on into it.
        """
        fitting = [at for at, known in enumerate(self.sizes) if known <= size]
        if not fitting:
            return False
        self._highest = min(self._highest, fitting[-1])
        self._top = min(self._top, self._highest)
        self._rates = {at: rates for at, rates in self._rates.items() if at <= self._highest}
        self._is_climbing = True
        self._measure_more()
        self._decide()
        return True

    def allow(self, size: int) -> None:
        """Sizes up to `size` may be come to again; the largest of them is measured next, whatever smaller ones gave."""
        self._highest = max(self._highest, max((at for at, known in enumerate(self.sizes) if known <= size), default=0))
        if self._highest > self._top:
            self._top = self._at = self._highest
            self._measure_more()
            self.is_done = False

    def _measure_more(self) -> None:
        self._limit = max(self._limit, self.num_measured + 2)

    def _decide(self) -> None:
        following = self._following() if self.num_measured < self._limit else None
        self.is_done = following is None
        self._at = self._best() if following is None else following

    def _following(self) -> int | None:
        if not self._rates:
            return 0
        if self._is_climbing:
            above = self._above()
            if above is not None:
                return above
            self._is_climbing = False
        for look in (self._around, self._between, self._again):
            following = look()
            if following is not None:
                return following
        return None

    def _above(self) -> int | None:
        highest = max(self._rates)
        is_falling = self._rate(highest) < CLEARLY * self._rate(self._best())
        if is_falling or highest >= self._top:
            return None
        return min(highest + self._stride, self._top)

    def _around(self) -> int | None:
        """The middle of the wider of the two gaps beside the best."""
        best = self._best()
        known = sorted(self._rates)
        place = known.index(best)
        neighbours = [known[beside] for beside in (place - 1, place + 1) if 0 <= beside < len(known)]
        if not neighbours:
            return None
        beside = max(neighbours, key=lambda at: (abs(at - best), self._rate(at)))
        return (best + beside) // 2 if abs(best - beside) > 1 else None

    def _between(self) -> int | None:
        """The middle of the widest gap that may hide a second summit: one with an end near the best."""
        if self.num_measured >= self._limit - 4:
            return None
        near = CLEARLY * self._rate(self._best())
        gaps = [
            (high - low, (low + high) // 2)
            for low, high in pairwise(sorted(self._rates))
            if high - low > 1 and max(self._rate(low), self._rate(high)) >= near
        ]
        return max(gaps)[1] if gaps else None

    def _again(self) -> int | None:
        """Whichever of the best two was measured fewer times, until both were measured twice."""
        ranked = sorted(self._rates, key=lambda at: self._rate(at), reverse=True)[:2]
        fewest = min(ranked, key=lambda at: len(self._rates[at]))
        return fewest if len(self._rates[fewest]) < 2 and len(ranked) > 1 else None

    def _rate(self, at: int) -> float:
        return sum(self._rates[at]) / len(self._rates[at])

    def _best(self) -> int:
        return max(self._rates, key=lambda at: self._rate(at), default=0)


def sizes_between(smallest: int, largest: int) -> list[int]:
    """Sizes from `smallest` to `largest`, each about the square root of 2 times the one before.

    >>> sizes_between(1, 20)
    [1, 2, 3, 4, 6, 8, 11, 16, 20]
    """
    sizes, step = [], 0
    while (size := round(smallest * 2 ** (step / 2))) < largest:
        sizes.append(size)
        step += 1
    return list(dict.fromkeys([*sizes, largest]))

"""`Auto`: micro-batch sizes tuned while training. Every size gives the same gradient, so that no trial is wasted."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from anybatch.core import Batch, MicroBatches, Rows, Split, tensors
from anybatch.errors import SplitError
from anybatch.ragged.cheapest_cut import best_cut
from anybatch.ragged.cost import Cost
from anybatch.ragged.tokens import Tokens

LIMIT = 12
"""Measurements after which a search ends."""
CLEARLY = 0.85
"""A rate below this share of the best ends the ascent. The noise of a shared machine is smaller."""
STRIDE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One size and its measured rates."""

    size: int
    rates: tuple[float, ...]

    @property
    def rate(self) -> float:
        """Mean of the rates: the best of several would favour sizes that were measured more often."""
        return sum(self.rates) / len(self.rates)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The micro-batch size that `Auto` chose, and why.

    Args:
        kind: "rows" or "tokens": the unit of `size`.
        size: Most rows, or tokens with padding, per micro-batch.
        is_settled: False while sizes are still being tried; `size` is then the best so far.
        trials: Sizes that were measured and their rates, in work per second, which compare within one choice only.
        num_updates: Updates that were measured, all of them real training. By tokens, one more came before them.
    """

    kind: str
    size: int
    is_settled: bool
    trials: tuple[Trial, ...]
    num_updates: int

    def describe(self) -> str:
        """Return a sentence about the choice and the other sizes that were tried."""
        if not self.trials:
            return f"{self.size} {self.kind} per micro-batch to begin with; nothing measured yet."
        state = "chosen" if self.is_settled else "best so far"
        best = max(trial.rate for trial in self.trials)
        tried = ", ".join(f"{trial.size}: {trial.rate / best:.0%}" for trial in self.trials)
        return (
            f"{self.size} {self.kind} per micro-batch, {state} after {self.num_updates} updates as the fastest of {tried} "
            "(rates, as shares of the best)."
        )


@dataclass(slots=True)
class _Tuning:
    """The search for batches of one shape, and the amount of work in the batch that was cut last."""

    kind: str
    search: "Search"
    amount: float = 0
    """0 if the next rate is not to be counted."""
    is_warm: bool = False
    """True after the first batch by tokens, whose times fit the cost."""
    cost: Cost | None = None
    """The cost that measures the work of all ragged batches of this search, so that their rates compare."""


class Auto(Split):
    """Micro-batch sizes tried on real updates; the fastest stays.

    Sizes are tried from small to large and not far beyond the best, but memory limits are not known here. Batches of another
    shape (twice the rows, or rows twice as large) have a search of their own, which is remembered.

    Args:
        most: Largest micro-batch allowed: a number of rows, `Rows(n)`, or `Tokens(budget, ...)`, the budget of which is tuned.
            Without it, a batch with `attention_mask` is split by tokens and any other by rows, up to the whole batch.

    Raises:
        SplitError: If `most` is anything else.

    >>> import torch
    >>> auto = Auto(most=64)
    >>> len(auto.cut(torch.zeros(100, 3)))
    100
    >>> auto.choice.describe()
    '1 rows per micro-batch to begin with; nothing measured yet.'
    """

    def __init__(self, most: "int | Rows | Tokens | None" = None) -> None:
        if most is not None and not isinstance(most, (int, Rows, Tokens)):
            raise SplitError(
                f"Auto(most={most!r}): give the largest micro-batch allowed, as a number of rows, such as 64, or as "
                "Tokens(8192), or None for the whole batch."
            )
        self.most = Rows(most) if isinstance(most, int) else most.learning() if isinstance(most, Tokens) else most
        self._tokens = self.most if isinstance(self.most, Tokens) else Tokens(1, learn=True)
        self._rows = self.most if isinstance(self.most, Rows) else Rows(1)
        self._tunings: dict[tuple[str, int, int], _Tuning] = {}
        self._last: _Tuning | None = None

    def __repr__(self) -> str:
        return f"Auto(most={self.most!r})"

    @property
    def choice(self) -> Choice | None:
        """The choice for batches like the last one; None before the first."""
        if self._last is None:
            return None
        kind, search = self._last.kind, self._last.search
        settled, measured = search.is_done, search.num_measured
        return Choice(kind=kind, size=search.best, is_settled=settled, trials=search.trials, num_updates=measured)

    @property
    def reads_dim_0(self) -> bool:
        return self._rows.reads_dim_0 and self._last is not None and self._last.kind == "rows"

    @property
    def bound(self) -> int:
        assert self._last is not None
        return self._last.search.bound

    def cut(self, batch: Batch) -> MicroBatches:
        is_masked = isinstance(batch, Mapping) and "attention_mask" in batch
        if isinstance(self.most, Tokens) or (self.most is None and is_masked):
            return self._cut_tokens(batch)
        return self._cut_rows(batch)

    def cut_in_arrival_order(self, batch: Batch, like: MicroBatches) -> MicroBatches:
        is_sorted = self._last is not None and self._last.kind == "tokens"
        return self._tokens.cut_in_arrival_order(batch, like) if is_sorted else like

    def _cut_rows(self, batch: Batch) -> MicroBatches:
        count = self._rows.count(batch)
        amount = max(count, sum(tensor.numel() for tensor in tensors(batch)))
        least, largest = self._rows.least(batch), min(count, self.most.size) if isinstance(self.most, Rows) else count
        # the smallest size for each number of micro-batches
        sizes = sorted({-(-count // -(-count // size)) for size in sizes_between(least, largest)})
        tuning = self._tuning("rows", count, amount, sizes, LIMIT)
        tuning.amount = amount
        return replace(self._rows, size=max(tuning.search.next_size, least)).cut(batch)

    def _cut_tokens(self, batch: Batch) -> MicroBatches:
        tokens = self._tokens
        rows = tokens.measure(batch)
        count, longest = len(rows.lengths), max(rows.lengths)
        bound = count * longest if self.most is None else tokens.budget
        largest = max(1, min(bound, count * longest))
        sizes = sizes_between(min(longest, largest), largest)
        tuning = self._tuning("tokens", count, sum(rows.lengths), sizes, LIMIT - 1)
        if not tuning.search.is_done:
            if tuning.is_warm:
                # work is the cost of the cheapest cut; larger micro-batches than it has are not worth a trial
                tuning.cost = tuning.cost or tokens.cost
                tuning.amount = best_cut(rows.lengths, largest, tuning.cost).cost(tuning.cost)
                tuning.search.cap(best_cut(rows.lengths, largest, tokens.cost).largest)
            tuning.is_warm = True
        # a row longer than the size to try still has to fit; one longer than the user's bound is an error
        return tokens.cut_to(max(tuning.search.next_size, min(longest, bound)), batch, rows)

    def _tuning(self, kind: str, count: int, amount: int, sizes: list[int], limit: int) -> _Tuning:
        key = (kind, count.bit_length(), (amount // count).bit_length())
        if key not in self._tunings:
            self._tunings[key] = _Tuning(kind, Search(sizes, limit=limit))
        self._last = self._tunings[key]
        return self._last

    def learn(self, ran: MicroBatches, seconds: Sequence[float | None]) -> None:
        total = sum(took for took in seconds if took is not None)
        if self._last is not None and total > 0 and self._last.amount > 0:
            self._last.search.tell(self._last.amount / total)
        if self._tokens.learn is not None:
            self._tokens.learn(ran, seconds)

    def shrink(self, ran: MicroBatches) -> "Auto | None":
        tuning = self._last
        assert tuning is not None
        largest, least = max(len(rows) for rows in ran.row_numbers), ran.together
        if tuning.kind == "tokens" and ran.cut is not None:
            largest, least = ran.cut.largest, max(ran.cut.lengths)
        if largest <= least or not tuning.search.limit(max(largest // 2, least)):
            return None
        if tuning.cost is None:
            tuning.is_warm = False  # the update that was to fit the cost did not run
        return self

    def resized(self, size: int) -> "Auto":
        for tuning in self._tunings.values():
            tuning.search.allow(size)
        return self


def sizes_between(smallest: int, largest: int) -> list[int]:
    """List sizes from `smallest` to `largest`, each about the square root of 2 times the one before.

    >>> sizes_between(1, 20)
    [1, 2, 3, 4, 6, 8, 11, 16, 20]
    """
    sizes, step = [], 0
    while (size := round(smallest * 2 ** (step / 2))) < largest:
        sizes.append(size)
        step += 1
    return list(dict.fromkeys([*sizes, largest]))


class Search:
    """Search for the fastest of some ascending sizes, whose rate is assumed to rise to one maximum and then to fall.

    First up in strides of 4, then ever smaller steps around the best, then other gaps, then the best two again in turn.
    `next_size` is the size to measure next, after the search the best, and `tell` takes its rate. Starting from the smallest,
    the search does not reach sizes far above the best, which may not fit in memory.
    """

    def __init__(self, sizes: Sequence[int], *, limit: int = LIMIT) -> None:
        self.sizes = tuple(sizes)
        self._rates: dict[int, list[float]] = {}
        """By index into `sizes`; so are `_at`, `_top` and `_highest`."""
        self._limit = limit
        self._is_climbing = True
        self._at = 0
        self._highest = self._top = len(self.sizes) - 1
        self.num_measured = 0
        self.is_done = False
        self._decide()

    @property
    def next_size(self) -> int:
        return self.sizes[self._at]

    @property
    def best(self) -> int:
        """The fastest size so far; the smallest before the first measurement."""
        return self.sizes[self._best()]

    @property
    def trials(self) -> tuple[Trial, ...]:
        return tuple(Trial(size=self.sizes[at], rates=tuple(self._rates[at])) for at in sorted(self._rates))

    @property
    def bound(self) -> int:
        """Upper bound of the search."""
        return self.sizes[self._highest]

    def tell(self, rate: float) -> None:
        """Add a measurement of `next_size`."""
        if not self.is_done:
            self._rates.setdefault(self._at, []).append(rate)
            self.num_measured += 1
            self._decide()

    def cap(self, size: int) -> None:
        """Leave out sizes above the first that reaches `size`: they make no difference."""
        reaching = (at for at, known in enumerate(self.sizes) if known >= size)
        self._top = min(next(reaching, self._highest), self._highest)
        if not self.is_done and not self._rates.get(self._at):
            self._at = min(self._at, self._top)

    def limit(self, size: int) -> bool:
        """Rule out sizes above `size`, which do not fit; return False, and change nothing, if all are above.

        Their measurements are dropped. If that leaves a gap below `size`, the ascent goes on into it.
        """
        fitting = [at for at, known in enumerate(self.sizes) if known <= size]
        if not fitting:
            return False
        self._highest = min(self._highest, fitting[-1])
        self._top = min(self._top, self._highest)
        self._rates = {at: rates for at, rates in self._rates.items() if at <= self._highest}
        self._is_climbing = True
        self._limit = max(self._limit, self.num_measured + 2)
        self._decide()
        return True

    def allow(self, size: int) -> None:
        """Allow sizes up to `size` again; the largest of them is measured next, whatever smaller ones gave."""
        self._highest = max(self._highest, max((at for at, known in enumerate(self.sizes) if known <= size), default=0))
        if self._highest > self._top:
            self._top = self._at = self._highest
            self._limit = max(self._limit, self.num_measured + 2)
            self.is_done = False

    def _decide(self) -> None:
        following = self._following() if self.num_measured < self._limit else None
        self.is_done = following is None
        self._at = self._best() if following is None else following

    def _following(self) -> int | None:
        if not self._rates:
            return 0
        highest = max(self._rates)
        is_falling = self._rate(highest) < CLEARLY * self._rate(self._best())
        self._is_climbing = self._is_climbing and not is_falling and highest < self._top
        if self._is_climbing:
            return min(highest + STRIDE, self._top)
        steps = (step() for step in (self._around, self._between, self._again))
        return next((following for following in steps if following is not None), None)

    def _around(self) -> int | None:
        """Return the middle of the wider of the two gaps next to the best."""
        best, known = self._best(), sorted(self._rates)
        place = known.index(best)
        neighbours = known[max(place - 1, 0) : place] + known[place + 1 : place + 2]
        if not neighbours:
            return None
        other = max(neighbours, key=lambda at: (abs(at - best), self._rate(at)))
        return (best + other) // 2 if abs(best - other) > 1 else None

    def _between(self) -> int | None:
        """Return the middle of the widest gap that may hide a second maximum: one with an end near the best."""
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
        """Return the less measured of the best two, until both were measured twice."""
        ranked = sorted(self._rates, key=self._rate, reverse=True)[:2]
        fewest = min(ranked, key=lambda at: len(self._rates[at]))
        return fewest if len(self._rates[fewest]) < 2 and len(ranked) > 1 else None

    def _rate(self, at: int) -> float:
        return sum(self._rates[at]) / len(self._rates[at])

    def _best(self) -> int:
        return max(self._rates, key=self._rate, default=0)


class Doubling(Split):
    """One row in the first batch, twice as many in each that follows, until memory runs out or `most` is reached.

    >>> import torch
    >>> doubling = Doubling(most=3)
    >>> cuts = []
    >>> for _ in range(4):
    ...     cuts.append(doubling.cut(torch.zeros(12)))
    ...     doubling.learn(cuts[-1], [])
    >>> [len(cut) for cut in cuts]
    [12, 6, 4, 4]
    """

    def __init__(self, most: int | None = None) -> None:
        self.size = 1
        self.is_settled = False
        self._most = most

    def cut(self, batch: Batch) -> MicroBatches:
        return Rows(self.size).cut(batch)

    def learn(self, ran: MicroBatches, seconds: Sequence[float | None]) -> None:
        if not self.is_settled and len(ran) > 1:
            self.size = 2 * self.size if self._most is None else min(2 * self.size, self._most)
            self.is_settled = self.size == self._most

    def resized(self, size: int) -> "Doubling":
        self.size = size
        return self

    def shrink(self, ran: MicroBatches) -> "Doubling | None":
        largest = max(len(rows) for rows in ran.row_numbers)
        if largest == 1:
            return None
        self.size, self.is_settled = largest // 2, True
        return self

"""`Auto`: micro-batches tuned while training. Every cut gives the same gradient, so that no try is wasted."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from anybatch.core import Batch, MicroBatches, Rows, Split, tensors
from anybatch.errors import SplitError
from anybatch.ragged.cheapest_cut import best_cut
from anybatch.ragged.cost import Cost
from anybatch.ragged.tokens import Tokens

LIMIT = 12
"""Measurements after which the search ends."""
CLEARLY = 0.85
"""A rate below this share of the best, beyond the noise of a shared machine, ends the way up."""
STRIDE = 4


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

    def __init__(self, sizes: Sequence[int], *, limit: int = LIMIT) -> None:
        self.sizes = tuple(sizes)
        self._rates: dict[int, list[float]] = {}
        """By index into `sizes`, as are `_at`, `_top` and `_highest`."""
        self._limit = limit
        self._is_climbing = True
        self._at = 0
        self._highest = self._top = len(self.sizes) - 1
        self.num_measured = 0
        self.is_done = False
        """True when nothing is left to try."""
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
        """Take the rate that `next_size` gave."""
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
        """Never try sizes above `size` again, which do not fit. False, and no change, where all are above.

        Their measurements are void; where that leaves a gap below `size`, the way up goes on into it.
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
        """Try sizes up to `size` again; the largest of them is measured next, whatever smaller ones gave."""
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
        highest = max(self._rates)
        is_falling = self._rate(highest) < CLEARLY * self._rate(self._best())
        self._is_climbing = self._is_climbing and not is_falling and highest < self._top
        if self._is_climbing:
            return min(highest + STRIDE, self._top)
        looks = (look() for look in (self._around, self._between, self._again))
        return next((following for following in looks if following is not None), None)

    def _around(self) -> int | None:
        """Find the middle of the wider of the two gaps beside the best."""
        best = self._best()
        known = sorted(self._rates)
        place = known.index(best)
        neighbours = [known[beside] for beside in (place - 1, place + 1) if 0 <= beside < len(known)]
        if not neighbours:
            return None
        beside = max(neighbours, key=lambda at: (abs(at - best), self._rate(at)))
        return (best + beside) // 2 if abs(best - beside) > 1 else None

    def _between(self) -> int | None:
        """Find the middle of the widest gap that may hide a second summit: one with an end near the best."""
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
        """Choose the one of the best two that was measured fewer times, until both were measured twice."""
        ranked = sorted(self._rates, key=self._rate, reverse=True)[:2]
        fewest = min(ranked, key=lambda at: len(self._rates[at]))
        return fewest if len(self._rates[fewest]) < 2 and len(ranked) > 1 else None

    def _rate(self, at: int) -> float:
        return sum(self._rates[at]) / len(self._rates[at])

    def _best(self) -> int:
        return max(self._rates, key=self._rate, default=0)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The micro-batch size that was chosen, and why."""

    kind: str
    """"rows" or "tokens": what `size` counts."""
    size: int
    """At most this many rows, or tokens with padding, per micro-batch."""
    is_settled: bool
    """False while sizes are still being tried; `size` is then the best so far."""
    trials: tuple[Trial, ...]
    """What was measured: sizes and rates, in work per second, which compares within one choice only."""
    num_updates: int
    """How many updates were measured, all of them real training. By tokens, one more came before them."""

    def describe(self) -> str:
        """Say in words what was chosen, and what else was tried."""
        state = "chosen" if self.is_settled else "best so far"
        if not self.trials:
            return f"{self.size} {self.kind} per micro-batch to begin with; nothing measured yet."
        best = max(trial.rate for trial in self.trials)
        tried = ", ".join(f"{trial.size}: {trial.rate / best:.0%}" for trial in self.trials)
        return (
            f"{self.size} {self.kind} per micro-batch, {state} after {self.num_updates} updates as the fastest of {tried} "
            "(rates, as shares of the best)."
        )


class Auto(Split):
    """Tries sizes on real updates, keeps the fastest, and looks again when rows change shape.

    `most` is the largest micro-batch allowed: a number of rows or `Rows(n)`; or `Tokens(budget, ...)`, whose budget is then
    tuned up to the one given. Without it, a batch with `attention_mask` is cut by tokens and any other by rows, up to the
    whole batch: sizes are tried from small to large and not far beyond the best, but nothing here knows what memory there
    is. Batches of another shape (twice the rows, or rows twice as large) have a search of their own, which is remembered.

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
        """What is chosen for batches like the last one; None before the first."""
        if self._last is None:
            return None
        kind, search = self._last.kind, self._last.search
        settled, measured = search.is_done, search.num_measured
        return Choice(kind=kind, size=search.best, is_settled=settled, trials=search.trials, num_updates=measured)

    @property
    def reads_dim_0(self) -> bool:
        """True where nobody said that dim 0 is the rows, and the last batch was cut by rows."""
        return self._rows.reads_dim_0 and self._last is not None and self._last.kind == "rows"

    def cut(self, batch: Batch) -> MicroBatches:
        """Cut `batch` at the size to try next, or at the best one."""
        is_masked = isinstance(batch, Mapping) and "attention_mask" in batch
        if isinstance(self.most, Tokens) or (self.most is None and is_masked):
            return self._cut_tokens(batch)
        return self._cut_rows(batch)

    def cut_in_arrival_order(self, batch: Batch, like: MicroBatches) -> MicroBatches:
        """As `Tokens` does: rows alone are never sorted."""
        is_sorted = self._last is not None and self._last.kind == "tokens"
        return self._tokens.cut_in_arrival_order(batch, like) if is_sorted else like

    def learn(self, ran: MicroBatches, seconds: Sequence[float | None]) -> None:
        """Take the rate of the batch that was cut last."""
        total = sum(took for took in seconds if took is not None)
        if self._last is not None and total > 0 and self._last.amount > 0:
            self._last.search.tell(self._last.amount / total)
        if self._tokens.learn is not None:
            self._tokens.learn(ran, seconds)

    def shrink(self, ran: MicroBatches) -> "Auto | None":
        """Never cut batches like this one to more than half of what did not fit; None where nothing smaller is left."""
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

    @property
    def bound(self) -> int:
        """The largest micro-batch that batches like the last one may be cut to; the fastest may be smaller."""
        assert self._last is not None
        return self._last.search.bound

    def resized(self, size: int) -> "Auto":
        """Return this split, which may try micro-batches of this size again."""
        for tuning in self._tunings.values():
            tuning.search.allow(size)
        return self

    def _cut_rows(self, batch: Batch) -> MicroBatches:
        count = self._rows.count(batch)
        amount = max(count, sum(tensor.numel() for tensor in tensors(batch)))
        least, largest = self._rows.least(batch), min(count, self.most.size) if isinstance(self.most, Rows) else count

        def begin() -> Search:  # the smallest size for each number of micro-batches
            return Search(sorted({-(-count // -(-count // size)) for size in sizes_between(least, largest)}))

        tuning = self._tuning("rows", count, amount, begin)
        tuning.amount = amount
        return replace(self._rows, size=max(tuning.search.next_size, least)).cut(batch)

    def _cut_tokens(self, batch: Batch) -> MicroBatches:
        tokens = self._tokens
        rows = tokens.measure(batch)
        count, longest = len(rows.lengths), max(rows.lengths)
        bound = count * longest if self.most is None else tokens.budget
        largest = max(1, min(bound, count * longest))

        def begin() -> Search:  # the first update fits the cost, by which the work in later ones is then compared
            return Search(sizes_between(min(longest, largest), largest), limit=LIMIT - 1)

        tuning = self._tuning("tokens", count, sum(rows.lengths), begin)
        if not tuning.search.is_done:
            tuning.weigh(rows.lengths, largest, tokens.cost)
        # a row longer than the size to try still has to fit; one longer than the user's bound is an error
        return tokens.cut_to(max(tuning.search.next_size, min(longest, bound)), batch, rows)

    def _tuning(self, kind: str, count: int, amount: int, begin: Callable[[], Search]) -> "_Tuning":
        key = (kind, count.bit_length(), (amount // count).bit_length())
        if key not in self._tunings:
            self._tunings[key] = _Tuning(kind, begin())
        self._last = self._tunings[key]
        return self._last


@dataclass(slots=True)
class _Tuning:
    """The search for batches of one shape, and the amount of work in the batch that was cut last."""

    kind: str
    search: Search
    amount: float = 0
    """0 where the next rate is not to be counted."""
    is_warm: bool = False
    cost: Cost | None = None
    """The cost that all ragged batches of this search are weighed by, so that the search does not see their differences."""

    def weigh(self, lengths: Sequence[int], budget: int, fitted: Cost) -> None:
        """Take the cost of the cheapest cut under the largest budget as the amount of work in a ragged batch.

        That cut's largest micro-batch is also the largest that is worth trying.
        """
        if not self.is_warm:
            self.is_warm, self.amount = True, 0
            return
        self.cost = self.cost or fitted
        self.amount = best_cut(lengths, budget, self.cost).cost(self.cost)
        self.search.cap(best_cut(lengths, budget, fitted).largest)


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
        """True when sizes are no longer tried."""
        self._most = most

    def cut(self, batch: Batch) -> MicroBatches:
        return Rows(self.size).cut(batch)

    def learn(self, ran: MicroBatches, seconds: Sequence[float | None]) -> None:
        """Double the size, as the micro-batches that were cut last have fitted."""
        if self.is_settled or len(ran) == 1:
            return
        self.size = 2 * self.size if self._most is None else min(2 * self.size, self._most)
        self.is_settled = self.size == self._most

    def resized(self, size: int) -> "Doubling":
        self.size = size
        return self

    def shrink(self, ran: MicroBatches) -> "Doubling | None":
        """Settle at half of what did not fit; None where that was one row."""
        largest = max(len(rows) for rows in ran.row_numbers)
        if largest == 1:
            return None
        self.size, self.is_settled = largest // 2, True
        return self

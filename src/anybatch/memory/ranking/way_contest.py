"""Checkpointing against smaller micro-batches, on real updates: both leave the same gradient, so that no try is wasted."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from torch import nn

from anybatch.batches import Auto, Batch, Choice, MicroBatches, Rows, Split, Tokens, in_arrival_order
from anybatch.errors import PlanError
from anybatch.memory.predicting import Plan, RankedWay, recomputing_of
from anybatch.memory.ranking.pass_times import Switch
from anybatch.parallel import peeled

MEASURED = 3
"""Updates of each way that are compared, once its micro-batch is settled."""


@dataclass(slots=True)
class _Entrant:
    """One way, its search for the fastest size, and its rows per second after that."""

    said: str
    auto: Auto
    switch: Switch
    way: RankedWay | None
    rates: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """The one in the middle: a single batch that something else held up does not count."""
        return sorted(self.rates)[len(self.rates) // 2]


class WayContest(Split):
    """A split whose micro-batches run with checkpointing first, at the fastest size that fits so; then without it.

    The way with more rows per second stays. Checkpointing is on while a batch runs and off between batches: the model that is
    validated, saved or copied is the one that was given. Without a `plain` split there is no contest, because only
    checkpointing fits.
    """

    def __init__(
        self, recomputed: Rows | Tokens, way: RankedWay, model: nn.Module, plain: Rows | Tokens | None
    ) -> None:
        self._entrants = [_Entrant(way.way, Auto(most=recomputed), recomputing_of(model).on, way)]
        if plain is not None:
            self._entrants.append(_Entrant("no checkpointing", Auto(most=plain), nullcontext, None))
        self._now = self._entrants[0]
        self._is_over = plain is None
        self._news = [self._said()]

    @property
    def way(self) -> RankedWay | None:
        """How batches run now; None without checkpointing."""
        return self._now.way

    @property
    def choice(self) -> Choice | None:
        """The micro-batch of the way that runs now."""
        return self._now.auto.choice

    @property
    def most(self) -> int:
        """The largest micro-batch of that way."""
        most = self._now.auto.most
        assert most is not None
        return most.budget if isinstance(most, Tokens) else most.size

    def news(self) -> list[str]:
        """What has changed since this was asked last, in words."""
        news, self._news = self._news, []
        return news

    def cut(self, batch: Batch) -> MicroBatches:
        """The micro-batches of `batch`, for the way that runs now."""
        return self._now.auto.cut(batch)

    def cut_in_arrival_order(self, batch: Batch, like: MicroBatches) -> MicroBatches:
        """As the split inside does, which made `like`."""
        return in_arrival_order(self._now.auto, batch, like)

    def watching(self) -> AbstractContextManager[object]:
        """The block in which a batch runs: checkpointed, where that is the way."""
        return self._now.switch()

    def learn(self, ran: MicroBatches, seconds: Sequence[float | None]) -> None:
        """Take the time of the batch that was cut last."""
        was_settled = self.choice is not None and self.choice.is_settled
        self._now.auto.learn(ran, seconds)
        total = sum(took for took in seconds if took is not None)
        if self._is_over or not was_settled or total <= 0:
            return
        self._now.rates.append(sum(len(rows) for rows in ran.row_numbers) / total)
        if len(self._now.rates) == MEASURED:
            self._go_on()

    def shrink(self, ran: MicroBatches) -> "WayContest | None":
        """This split with half of what did not fit; None where that was the least."""
        return None if self._now.auto.shrink(ran) is None else self

    @property
    def bound(self) -> int:
        """The largest micro-batch that batches like the last one may be cut to."""
        return self._now.auto.bound

    def resized(self, size: int) -> "WayContest":
        """This split, which may come to micro-batches of this size again."""
        self._now.auto.resized(size)
        return self

    def _go_on(self) -> None:
        before = self._now
        following = next((entrant for entrant in self._entrants if not entrant.rates), None)
        self._is_over = following is None
        self._now = following or max(self._entrants, key=lambda entrant: entrant.rate)
        if self._now is not before or self._is_over:
            self._news.append(self._said())

    def _said(self) -> str:
        rates = ", ".join(f"{entrant.said} {entrant.rate:.4g} rows/s" for entrant in self._entrants if entrant.rates)
        return f"{self._now.said} {'from now on' if self._is_over else 'is tried'}" + (f": {rates}" if rates else "")


def may_recompute(model: nn.Module) -> bool:
    """False of a model that offers no checkpointing, or is wrapped, so that no pass of it is measured."""
    try:
        return len(list(peeled(model))) == 1 and bool(recomputing_of(model).blocks)
    except PlanError:
        return False


def fastest_own_way(found: Plan) -> RankedWay | None:
    """The fastest way that was measured and that `Fit` runs by itself: it leaves saved tensors where they are."""
    return next((way for way in found.ranking if way.seconds is not None and way.kind != "offload"), None)


def fastest_split(found: Plan, model: nn.Module, plain: Rows | Tokens, largest: int) -> Auto | WayContest:
    """A split that looks for its fastest size up to `plain`; against checkpointing, where that is predicted to be faster.

    `largest` is the most that a micro-batch may ever be.
    """
    way = fastest_own_way(found)
    size = plain.budget if isinstance(plain, Tokens) else plain.size
    if way is None or way.kind == "smaller" or (found.fits and largest <= size):
        return Auto(most=plain)
    recomputed = plain.resized(min(way.micro_batch, largest))
    return WayContest(recomputed, way, model, plain if found.fits else None)

"""Updates, samples and time to the same loss, by batch: McCandlish et al. 2018, with the time of an update beside it.

updates(B) = least * (1 + noise / B)        samples(B) = B * updates(B)
seconds(B) = updates(B) * (fixed + row * B)     least at B = sqrt(noise * fixed / row)
"""

import math
from dataclasses import dataclass

FACTOR = 5.0
"""By how much noise scales missed what runs were seen to need, either way: 1.3 to 5.3 on six of them, `docs/noise.md`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tradeoff:
    """What a batch costs and brings. Numbers are multiples of those of `batch`."""

    noise: float
    """The noise scale, in rows."""
    batch: int
    fixed: float | None = None
    """Seconds that an update takes beside its rows: the step, the sum over ranks."""
    row: float | None = None
    """Seconds of one more row, on all ranks together."""
    least: int = 1
    """Rows of one micro-batch on every rank: what fewer would take was not measured."""

    def updates(self, batch: float) -> float:
        """Updates to the same loss.

        >>> round(Tradeoff(noise=48, batch=64).updates(128), 3)
        0.786
        """
        return (1 + self.noise / batch) / (1 + self.noise / self.batch)

    def samples(self, batch: float) -> float:
        """Rows to the same loss.

        >>> round(Tradeoff(noise=48, batch=64).samples(128), 3)
        1.571
        """
        return self.updates(batch) * batch / self.batch

    def seconds(self, batch: float) -> float | None:
        """Time to the same loss; None where times are not known."""
        if self.fixed is None or self.row is None or batch < self.least:
            return None
        return self.updates(batch) * (self.fixed + self.row * batch) / (self.fixed + self.row * self.batch)

    @property
    def soonest(self) -> float | None:
        """The batch that reaches a loss soonest, one micro-batch or more; None where times are not known.

        >>> Tradeoff(noise=48, batch=64, fixed=0.012, row=0.001).soonest
        24.0
        """
        if self.fixed is None or not self.row:
            return None
        return max(math.sqrt(self.noise * self.fixed / self.row), float(self.least))

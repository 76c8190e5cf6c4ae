"""Learning what micro-batches cost from those that ran."""

from collections import deque
from collections.abc import Iterable
from typing import Any

from anybatch.errors import SplitError
from anybatch.ragged.cost import Cost, Observation, fit_cost

FEWEST = 12
"""Three constants are not fitted to fewer observations."""
REMEMBERED = 256
"""Older micro-batches are forgotten: the machine and the model may change."""


class LearnedCost:
    """A cost that is fitted again each time the observations have doubled, and later every `REMEMBERED` of them.

    `batches` is how many it learns from: None for all, 0 for none; after that it stays as it is. A fit takes 1 to 4 ms; at this
    rate it is some 10 us per micro-batch.
    """

    def __init__(self, prior: Cost, *, batches: int | None = None) -> None:
        self.cost = prior
        self._prior = prior
        self._batches = batches
        self._num_batches = 0
        self._recent: deque[Observation] = deque(maxlen=REMEMBERED)
        self._num_new = 0

    @property
    def is_learning(self) -> bool:
        """False where the cost stays as it is. Batches of few micro-batches do not end it before there is a fit."""
        if self._batches is None or self._batches == 0:
            return self._batches is None
        return self._num_batches < self._batches or len(self._recent) < FEWEST

    def observe(self, observations: Iterable[Observation]) -> None:
        """Remember the micro-batches of one batch that ran, and fit again when it is time to, or at the last batch."""
        if not self.is_learning:
            return
        self._num_batches += 1
        for observation in observations:
            if observation[2] > 0:
                self._recent.append(observation)
                self._num_new += 1
        is_time = self._num_new >= max(FEWEST, (len(self._recent) + 1) // 2)
        if is_time or (not self.is_learning and self._num_new):
            self.cost = fit_cost(self._recent, self._prior)
            self._num_new = 0

    def state_dict(self) -> dict[str, Any]:
        """The fit and what it came from, as plain values."""
        return {
            "cost": list(self.cost.constants),
            "batches": self._num_batches,
            "recent": [list(observation) for observation in self._recent],
            "new": self._num_new,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        try:
            fixed, per_token, per_square = state["cost"]
            recent = [(int(rows), int(length), float(seconds)) for rows, length, seconds in state["recent"]]
            num_batches, num_new = int(state["batches"]), int(state["new"])
        except (KeyError, TypeError, ValueError) as error:
            raise SplitError(
                f"{state!r:.80} is no saved cost of Tokens: give what its state_dict() returned."
            ) from error
        self.cost = Cost(fixed=fixed, per_token=per_token, per_square=per_square)
        self._recent = deque(recent, maxlen=REMEMBERED)
        self._num_batches, self._num_new = num_batches, num_new

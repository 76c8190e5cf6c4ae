"""Learning what micro-batches cost from those that ran."""

from collections import deque
from collections.abc import Iterable

from anybatch.batches.cost.pass_cost import Cost, Observation, fit_cost

FEWEST = 12
"""Three constants are not fitted to fewer observations."""
REMEMBERED = 256
"""Older micro-batches are forgotten: the machine and the model may change."""


class LearnedCost:
    """A cost that is fitted again each time the observations have doubled, and later every `REMEMBERED` of them.

    A fit takes 1 to 4 ms; at this rate it is some 10 us per micro-batch.
    """

    def __init__(self, prior: Cost) -> None:
        self.cost = prior
        self._prior = prior
        self._recent: deque[Observation] = deque(maxlen=REMEMBERED)
        self._num_new = 0

    def observe(self, observations: Iterable[Observation]) -> None:
        """Remember what ran, and fit again when it is time to."""
        for observation in observations:
            if observation[2] > 0:
                self._recent.append(observation)
                self._num_new += 1
        if self._num_new >= max(FEWEST, (len(self._recent) + 1) // 2):
            self.cost = fit_cost(self._recent, self._prior)
            self._num_new = 0

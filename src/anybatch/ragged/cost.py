"""The cost of a micro-batch, and its fit to measured times."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from anybatch.errors import SplitError

Observation = tuple[int, int, float]
"""(rows, length, seconds) of one micro-batch that ran."""
FEWEST = 12
"""Fewest observations that three constants are fitted to."""
REMEMBERED = 256
"""Observations kept. Older ones are forgotten, because the machine and the model may change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of a micro-batch of `rows` rows padded to `length`.

        fixed + per_token * rows * length + per_square * rows * length**2

    Only the proportions matter to a split; fitted constants are seconds. The defaults, in units of one token, are those of a
    transformer of 4 layers x 256 on a CPU: 9.8 ms + 337 us per token + 228 ns per token and position.

    Args:
        fixed: Cost of a micro-batch without rows.
        per_token: Cost of a token, padding included.
        per_square: Cost of a token for each position of its row, as in attention.

    Raises:
        SplitError: If a constant is negative or not finite, or all are 0.
    """

    fixed: float = 29.0
    per_token: float = 1.0
    per_square: float = 0.0007

    def __post_init__(self) -> None:
        if not all(0 <= constant < float("inf") for constant in self.constants) or self.of(1, 1) == 0:
            raise SplitError(
                f"{self!r}: the constants of a cost must be finite, 0 or more, and not all 0. Leave cost=None to have them "
                "fitted while training."
            )

    @property
    def constants(self) -> tuple[float, float, float]:
        """`fixed`, `per_token` and `per_square`."""
        return self.fixed, self.per_token, self.per_square

    def of(self, rows: int, length: int) -> float:
        """Return the cost of a micro-batch of `rows` rows padded to `length`."""
        return self.fixed + rows * self.of_row(length)

    def of_row(self, length: int) -> float:
        """Return the cost that one more row padded to `length` adds."""
        return length * (self.per_token + self.per_square * length)


class LearnedCost:
    """A cost that is fitted again each time the observations have doubled, and later every `REMEMBERED` / 2 of them.

    It learns from `batches` batches, or from all of them if None. A fit takes 1 to 4 ms, about 10 us per micro-batch.
    """

    def __init__(self, prior: Cost, *, batches: int | None = None) -> None:
        self.cost = self._prior = prior
        self._batches = batches
        self._num_batches = 0
        self._recent: deque[Observation] = deque(maxlen=REMEMBERED)
        self._num_new = 0

    @property
    def is_learning(self) -> bool:
        """True until `batches` have been seen, and enough micro-batches for one fit."""
        if not self._batches:
            return self._batches is None
        return self._num_batches < self._batches or len(self._recent) < FEWEST

    def observe(self, observations: Iterable[Observation]) -> None:
        """Add the micro-batches of one batch, and fit again if it is time to, or if this was the last batch."""
        if not self.is_learning:
            return
        self._num_batches += 1
        timed = [observation for observation in observations if observation[2] > 0]
        self._recent.extend(timed)
        self._num_new += len(timed)
        is_time = self._num_new >= max(FEWEST, (len(self._recent) + 1) // 2)
        if is_time or (not self.is_learning and self._num_new):
            self.cost = fit_cost(self._recent, self._prior)
            self._num_new = 0

    def state_dict(self) -> dict[str, Any]:
        recent = [list(observation) for observation in self._recent]
        return {"cost": [*self.cost.constants], "batches": self._num_batches, "recent": recent, "new": self._num_new}

    def load_state_dict(self, state: dict[str, Any]) -> None:
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


def fit_cost(observations: Sequence[Observation], prior: Cost, *, rounds: int = 8, pull: float = 0.02) -> Cost:
    """Fit the constants, 0 or more, to the times; constants that these leave open keep the proportions of `prior`.

    Least squares of relative errors, reweighted in `rounds` so that outliers (a warm-up, a busy machine) count little. Each
    round starts from the constants of the last one and is pulled towards them with the weight of `pull` observations.
    """
    scale = _median(seconds / prior.of(rows, length) for rows, length, seconds in observations)
    if not scale > 0:
        return prior
    # constants never reach 0, so that a later round can raise them again
    row = _median(prior.of_row(length) for _, length, _ in observations)
    length = _median(length for _, length, _ in observations)
    least = [scale * 1e-3 * row * share for share in (1.0, 1 / length, 1 / length**2)]
    constants = [scale * constant for constant in prior.constants]
    for _ in range(rounds):
        constants = [max(constant, floor) for constant, floor in zip(constants, least, strict=True)]
        terms = [(constants[0], constants[1] * r * n, constants[2] * r * n * n) for r, n, _ in observations]
        measured = [seconds / sum(term) for term, (_, _, seconds) in zip(terms, observations, strict=True)]
        centre = _median(one - 1 for one in measured)
        spread = 1.5 * _median(abs(one - 1 - centre) for one in measured) + 1e-3
        weights = [min(1.0, spread / max(abs(one - 1 - centre), 1e-12)) ** 2 for one in measured]
        shares = [[part / sum(term) for part in term] for term in terms]
        multiples = _least_squares(shares, measured, weights, pull)
        constants = [constant * multiple for constant, multiple in zip(constants, multiples, strict=True)]
    return Cost(fixed=constants[0], per_token=constants[1], per_square=constants[2])


def _least_squares(
    shares: Sequence[Sequence[float]], measured: Sequence[float], weights: Sequence[float], pull: float
) -> list[float]:
    """Return u >= 0 that minimises sum_k weights_k * (u . shares_k - measured_k)**2 + pull * |u - 1|**2.

    Tries all seven choices of which of the three numbers are above 0.
    """
    matrix = [[pull if row == column else 0.0 for column in range(3)] for row in range(3)]
    right = [pull] * 3
    for share, value, weight in zip(shares, measured, weights, strict=True):
        for row in range(3):
            right[row] += weight * share[row] * value
            for column in range(3):
                matrix[row][column] += weight * share[row] * share[column]
    found: list[tuple[float, list[float]]] = []
    for free in (free for size in (3, 2, 1) for free in combinations(range(3), size)):
        solved = _solve([[matrix[row][column] for column in free] for row in free], [right[row] for row in free])
        if min(solved) >= 0:
            full = dict(zip(free, solved, strict=True))
            value = -sum(one * right[row] for row, one in full.items())
            found.append((value, [full.get(row, 0.0) for row in range(3)]))
    return min(found, key=lambda one: one[0])[1]  # each number alone has a positive solution


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solve a small positive definite system by Gaussian elimination without pivoting."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for pivot in range(size):
        for other in range(size):
            if other != pivot:
                factor = rows[other][pivot] / rows[pivot][pivot]
                rows[other] = [mine - factor * theirs for mine, theirs in zip(rows[other], rows[pivot], strict=True)]
    return [rows[index][size] / rows[index][index] for index in range(size)]


def _median(numbers: Iterable[float]) -> float:
    """Return the upper median; `statistics` would load `decimal` and `fractions` with it."""
    ranked = sorted(numbers)
    return ranked[len(ranked) // 2]

"""The cost of a micro-batch, and its fit to measured times."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from anybatch.errors import SplitError

Observation = tuple[int, int, float]
"""(rows, length, seconds) of one micro-batch that ran."""

Coefficients = tuple[float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of a micro-batch of `rows` rows padded to `length`.

        fixed + per_token * rows * length + per_square * rows * length**2

    Only the proportions matter to a cut; fitted constants are seconds. The defaults, in tokens, are those of a
    transformer of 4 layers x 256 on a CPU: 9.8 ms + 337 us per token + 228 ns per token and position.
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
    def constants(self) -> Coefficients:
        return self.fixed, self.per_token, self.per_square

    def of(self, rows: int, length: int) -> float:
        """Return the cost of one micro-batch."""
        return self.fixed + rows * self.of_row(length)

    def of_row(self, length: int) -> float:
        """Return what one more row of this padded length adds."""
        return length * (self.per_token + self.per_square * length)


def fit_cost(observations: Sequence[Observation], prior: Cost, *, rounds: int = 8, pull: float = 0.02) -> Cost:
    """Find the constants, 0 or more, that explain the times best; where these leave them open, in `prior`'s proportions.

    Least squares of relative errors, reweighted in a few `rounds` so that a micro-batch far from the rest (a warm-up, a
    busy machine) counts little. Each round starts from the last one's constants, held there with the weight `pull`, in
    observations.
    """
    scale = _median(seconds / prior.of(rows, length) for rows, length, seconds in observations)
    if not scale > 0:
        return prior
    # a constant that was 0 may turn out not to be: it is never given up altogether
    row = _median(prior.of_row(length) for _, length, _ in observations)
    length = _median(length for _, length, _ in observations)
    least = [scale * 1e-3 * row * share for share in (1.0, 1 / length, 1 / length**2)]
    constants = [scale * constant for constant in prior.constants]
    for _ in range(rounds):
        constants = [max(constant, floor) for constant, floor in zip(constants, least, strict=True)]
        terms = [(constants[0], constants[1] * r * n, constants[2] * r * n * n) for r, n, _ in observations]
        predicted = [sum(term) for term in terms]
        off = [seconds / expected - 1 for (_, _, seconds), expected in zip(observations, predicted, strict=True)]
        centre = _median(off)
        spread = 1.5 * _median(abs(one - centre) for one in off) + 1e-3
        weights = [min(1.0, spread / max(abs(one - centre), 1e-12)) ** 2 for one in off]
        multiples = _least_squares(zip(terms, observations, predicted, weights, strict=True), pull)
        constants = [constant * multiple for constant, multiple in zip(constants, multiples, strict=True)]
    return Cost(fixed=constants[0], per_token=constants[1], per_square=constants[2])


def _least_squares(points: Iterable[tuple[Coefficients, Observation, float, float]], pull: float) -> Coefficients:
    """Find u >= 0 that minimises sum w * ((u . term - seconds) / predicted)**2 + pull * |u - 1|**2."""
    matrix = [[pull if row == column else 0.0 for column in range(3)] for row in range(3)]
    right = [pull] * 3
    for term, (_, _, seconds), expected, weight in points:
        share = [part / expected for part in term]
        for row in range(3):
            weighted = weight * share[row]
            right[row] += weighted * seconds / expected
            for column in range(3):
                matrix[row][column] += weighted * share[column]
    return _non_negative(matrix, right)


def _non_negative(matrix: list[list[float]], right: list[float]) -> Coefficients:
    """Find u >= 0 that minimises u.M.u - 2 r.u, by trying which of the three are above 0: there are only 7 ways."""
    found: list[tuple[float, Coefficients]] = []
    for free in (free for size in (3, 2, 1) for free in combinations(range(3), size)):
        solved = _solve([[matrix[row][column] for column in free] for row in free], [right[row] for row in free])
        if min(solved) >= 0:
            value = -sum(one * right[row] for one, row in zip(solved, free, strict=True))
            full = dict(zip(free, solved, strict=True))
            found.append((value, (full.get(0, 0.0), full.get(1, 0.0), full.get(2, 0.0))))
    return min(found, key=lambda one: one[0])[1]  # each constant alone has a positive solution


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solve a small positive definite system by Gauss without pivoting."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for pivot in range(size):
        for other in range(size):
            if other != pivot:
                factor = rows[other][pivot] / rows[pivot][pivot]
                rows[other] = [mine - factor * theirs for mine, theirs in zip(rows[other], rows[pivot], strict=True)]
    return [rows[index][size] / rows[index][index] for index in range(size)]


def _median(numbers: Iterable[float]) -> float:
    """Return the middle value; the upper of the two middle ones where their number is even."""
    ranked = sorted(numbers)
    return ranked[len(ranked) // 2]


FEWEST = 12
"""Fewest observations that three constants are fitted to."""
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
        if not self._batches:
            return self._batches is None
        return self._num_batches < self._batches or len(self._recent) < FEWEST

    def observe(self, observations: Iterable[Observation]) -> None:
        """Remember the micro-batches of one batch that ran, and fit again when it is time to, or at the last batch."""
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
        """Return the fit and what it came from, as plain values."""
        return {
            "cost": list(self.cost.constants),
            "batches": self._num_batches,
            "recent": [list(observation) for observation in self._recent],
            "new": self._num_new,
        }

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

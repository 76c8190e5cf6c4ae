"""What a contender was told to learn against what it learnt."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.table.case import Case
from benchmarks.table.reference import whole_batch
from benchmarks.table.witness import Recorded, Run

WRONG_WEIGHT = 0.02
"""A row whose weight is off by more than this share is weighted wrongly; bf16 alone reaches 0.005."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One cell of the table."""

    error: float | None
    """The largest relative error of the gradient, over the updates whose gradient is finite; None if none is."""
    updates: int
    wanted_updates: int
    nonfinite: int
    """Updates that were handed an inf or nan."""
    dropped: int
    """Rows, over all epochs, that no update learnt from."""
    repeated: int
    """Rows that were learnt from once too often."""
    misweighted: int
    """Rows whose weight in their update is off by more than 2 %."""
    lr: float
    """The learning rate at the end, as a share of the first."""
    wanted_lr: float
    scheduler_steps: int | None
    limit: float
    note: str = ""
    errors: tuple[float, ...] = ()
    """Of every update whose gradient is finite."""

    @property
    def is_exact(self) -> bool:
        """Every update there, none off, no row lost, the learning rate where it should be."""
        return (
            self.error is not None
            and self.error <= self.limit
            and self.updates == self.wanted_updates
            and not self.nonfinite
            and not self.dropped
            and not self.repeated
            and not self.misweighted
            and abs(self.lr - self.wanted_lr) < 1e-9
        )


def judge(case: Case, runs: Sequence[Run]) -> Outcome:
    """Compare every update with the batch that it shares most rows with; `runs` are those of all ranks."""
    updates = [merged(parts) for parts in zip(*(run.updates for run in runs), strict=True)]
    wanted = case.wanted()
    errors, nonfinite, misweighted, used = [], 0, 0, Counter[int]()
    for recorded, number in zip(updates, matches(updates, wanted), strict=True):
        used.update(recorded.times)
        reference = whole_batch(case, recorded, wanted[number])
        error = float((recorded.gradient - reference.gradient).norm() / reference.gradient.norm())
        if not math.isfinite(error):
            nonfinite += 1
            continue
        errors.append(error)
        if case.are_weights_seen and not case.are_rows_coupled and not case.is_scaled:
            misweighted += count_misweighted(recorded, reference.rows, ranks=case.ranks)
    should = Counter(row for rows in wanted for row in rows)
    return Outcome(
        error=max(errors, default=None),
        updates=len(updates),
        wanted_updates=len(wanted),
        nonfinite=nonfinite,
        dropped=sum(times for row, times in (should - used).items() if case.has_target(row)),
        repeated=(used - should).total(),
        misweighted=misweighted,
        lr=runs[0].lr,
        wanted_lr=case.wanted_lr,
        scheduler_steps=runs[0].scheduler_steps,
        limit=case.limit,
        note=runs[0].note,
        errors=tuple(errors),
    )


def merged(parts: Sequence[Recorded]) -> Recorded:
    """One update of all ranks: the gradient that the first was handed, the rows of every one."""
    rows, times = Counter[int](), Counter[int]()
    for part in parts:
        times.update(part.times)
        for row, norm in part.rows.items():
            rows[row] += norm  # type: ignore[assignment]
    return Recorded(gradient=parts[0].gradient, weights=parts[0].weights, rows=dict(rows), times=dict(times))


def matches(updates: Sequence[Recorded], wanted: Sequence[range]) -> list[int]:
    """For each update the batch that it shares most rows with, none before that of the update before it."""
    found, start = [], 0
    for recorded in updates:
        ahead = range(min(start, len(wanted) - 1), len(wanted))
        number = max(ahead, key=lambda number: (sum(row in wanted[number] for row in recorded.times), -number))
        found.append(number)
        start = number + 1
    return found


def count_misweighted(recorded: Recorded, wanted: dict[int, float], *, ranks: int) -> int:
    """Rows whose output was given another gradient than in the whole batch; ranks are averaged afterwards."""
    return sum(
        abs(recorded.rows[row] / ranks - norm) > WRONG_WEIGHT * norm
        for row, norm in wanted.items()
        if row in recorded.rows
    )

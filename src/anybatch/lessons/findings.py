"""What a comparison found, in sentences that follow from its numbers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from anybatch.records import Arm, Spread, at_epoch, over_runs
from anybatch.sizes import show_bytes


def show_spread(value: Spread, metric: str | None) -> str:
    """A metric as a percentage, a loss as it is, with its deviation where there is one.

    >>> show_spread(Spread(0.9712, 0.004), "accuracy"), show_spread(Spread(0.25, None), None)
    ('97.1 ± 0.4 %', '0.2500')
    """
    factor, digits, unit = (1, 4, "") if metric is None else (100, 1, " %")
    shown = [f"{factor * part:.{digits}f}" for part in (value.mean, value.deviation) if part is not None]
    return " ± ".join(shown) + unit if shown else "-"


def findings(arms: Sequence[Arm], metric: str | None, *, rows: int, num_batch_norms: int = 0) -> tuple[str, ...]:
    """Plain sentences on the four arms: small batch, usual loop, exact batch, exact batch with the rule."""
    small, usual, exact, scaled = arms
    judge = _Judge(metric, len(exact.runs))
    said = [
        _per_epoch(small, exact, 1, judge),
        _rule(small, exact, scaled, 1, judge),
        _at_the_end(small, exact, scaled, judge),
        _tail(usual, exact, rows, judge),
        _memory(small, exact),
        _time(small, exact),
        _batch_norm(exact, num_batch_norms),
    ]
    return tuple(sentence for sentence in said if sentence)


@dataclass(frozen=True, slots=True)
class _Judge:
    metric: str | None
    num_seeds: int

    @property
    def name(self) -> str:
        return self.metric or "validation loss"

    def at(self, arm: Arm, epoch: int) -> Spread:
        """The arm's metric after an epoch; 0 stands for the last."""
        return at_epoch(arm, epoch, lambda point: point.metric)

    def show(self, arm: Arm, epoch: int) -> str:
        return show_spread(self.at(arm, epoch), self.metric)

    def order(self, first: Arm, second: Arm, epoch: int) -> int:
        """1 where the first is clearly better, -1 where the second is, 0 where the seeds do not tell."""
        one, other = self.at(first, epoch), self.at(second, epoch)
        if one.mean is None or other.mean is None:
            return 0
        difference = one.mean - other.mean if self.metric is not None else other.mean - one.mean
        noise = math.hypot(one.deviation or 0.0, other.deviation or 0.0)
        return 0 if not abs(difference) > noise else (1 if difference > 0 else -1)

    @property
    def caution(self) -> str:
        return " (One seed: chance is not excluded.)" if self.num_seeds == 1 else ""


def _updates_per_epoch(arm: Arm) -> int:
    return (arm.runs[0].updates or 0) // len(arm.runs[0].epochs)


def _per_epoch(small: Arm, exact: Arm, epoch: int, judge: _Judge) -> str:
    numbers = (
        f"{judge.show(exact, epoch)} {judge.name} with the exact batch of {exact.batch} against {judge.show(small, epoch)} "
        f"with batches of {small.batch}"
    )
    counts = f"{_updates_per_epoch(exact)} updates per epoch against {_updates_per_epoch(small)}"
    order = judge.order(exact, small, epoch)
    verdict = {
        -1: f"the larger batch learns more slowly per epoch: it makes {counts}",
        0: f"no clear difference between the two, though one makes {counts}",
        1: f"the larger batch is ahead, though it makes {counts}",
    }[order]
    return f"At the same learning rate, after epoch {epoch}: {numbers}: {verdict}.{judge.caution}"


def _rule(small: Arm, exact: Arm, scaled: Arm, epoch: int, judge: _Judge) -> str:
    against_exact, against_small = judge.order(scaled, exact, epoch), judge.order(scaled, small, epoch)
    gain = {
        1: "better than without the rule",
        0: "not clearly different from without",
        -1: "worse than without the rule",
    }[against_exact]
    level = {
        1: f"and ahead of batches of {small.batch}",
        0: f"and level with batches of {small.batch} ({judge.show(small, epoch)})",
        -1: f"and still behind batches of {small.batch} ({judge.show(small, epoch)})",
    }[against_small]
    return (
        f"With the learning rate scaled from {exact.lr:.4g} to {scaled.lr:.4g}, the exact batch has "
        f"{judge.show(scaled, epoch)} after epoch {epoch}: {gain}, {level}."
    )


def _at_the_end(small: Arm, exact: Arm, scaled: Arm, judge: _Judge) -> str:
    arms = (small, exact, scaled)
    shown = ", ".join(f"{arm.name} {judge.show(arm, 0)}" for arm in arms)
    pairs = [(one, other) for one in arms for other in arms if judge.order(one, other, 0) > 0]
    verdict = (
        "clearly apart are only these: " + ", ".join(f"{one.name} above {other.name}" for one, other in pairs)
        if pairs
        else "the seeds do not tell them apart"
    )
    if judge.metric is None:
        verdict = verdict.replace(" above ", " better than ")
    return f"After the last epoch, {len(exact.runs[0].epochs)}: {shown}; {verdict}."


def _tail(usual: Arm, exact: Arm, rows: int, judge: _Judge) -> str:
    dropped = rows - (usual.runs[0].samples_seen or 0) // len(usual.runs[0].epochs)
    updates = f"{usual.runs[0].updates} updates against {exact.runs[0].updates}"
    order = judge.order(exact, usual, 0)
    verdict = {
        1: "the exact batch ends clearly better",
        0: "the end result does not clearly differ",
        -1: "the usual loop ends clearly better here",
    }[order]
    ends = f"{judge.show(usual, 0)} against {judge.show(exact, 0)}: {verdict}"
    if dropped == 0:
        return f"The usual loop sees every row here ({updates}), because the rows fill its windows; {ends}."
    return f"The usual loop leaves {dropped:,} of {rows:,} rows out in every epoch ({updates}); {ends}."


def _memory(small: Arm, exact: Arm) -> str:
    one, other = small.runs[0].peak_bytes, exact.runs[0].peak_bytes
    if not one or not other or not small.batch or not exact.batch:
        return ""
    return (
        f"Peak memory of an update: {show_bytes(other)} for the batch of {exact.batch} in micro-batches of "
        f"{exact.micro_batch}, {show_bytes(one)} for a batch of {small.batch}: {other / one:.2f} times, for a batch "
        f"{exact.batch / small.batch:g} times as large."
    )


def _time(small: Arm, exact: Arm) -> str:
    one, other = (over_runs(arm, lambda run: run.seconds).mean for arm in (small, exact))
    return f"Training took {other:.2f} s with the exact batch and {one:.2f} s with batches of {small.batch}, validation apart."


def _batch_norm(exact: Arm, num_batch_norms: int) -> str:
    if num_batch_norms == 0:
        return ""
    layers = "1 layer" if num_batch_norms == 1 else f"{num_batch_norms} layers"
    return (
        f"The exact batch is not quite exact here: BatchNorm ({layers}) takes its statistics from each micro-batch of "
        f"{exact.micro_batch}, in all arms."
    )

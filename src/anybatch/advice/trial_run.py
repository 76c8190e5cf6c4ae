"""A short training run that measures every update: what `anybatch advise TASK` learns of a task."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch

from anybatch.advice.tradeoff import Tradeoff
from anybatch.batches import Rows
from anybatch.noise import NOT_ASKED
from anybatch.projection import Network, PassSeconds
from anybatch.records import Metric, UpdateDone
from anybatch.training import Experiment, Loop, Settings, Task, assemble, first_batch

PARTS = 8
"""Micro-batches that a batch is cut into, where it would be one: so much is needed to tell noise from signal."""
ROUNDS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTrial:
    """What was seen."""

    tradeoff: Tradeoff
    micro_batch: int | None
    """Rows that the task holds in memory at once, as it is set up; None where they differ."""
    num_updates: int
    reason: str
    """Why there is no noise scale."""


def try_task(build: Callable[[], Task], settings: Settings, *, network: Network | None = None) -> TaskTrial:
    """Train for a few updates, measure each, and time updates of two sizes. On a `network`, times are those of its ranks.

    The noise scale is that of the later half: at the first weights all rows say the same.
    """
    experiment = assemble(build, settings)
    plan = experiment.plan
    rows = min(plan.batch, plan.rows)
    asked = plan.micro_batch if isinstance(plan.micro_batch, int) else None
    if asked is not None:
        size = min(asked, max(rows // PARTS, 1)) if asked >= rows else asked
        experiment.update.accumulator.split = Rows(size)
    seen: list[float] = []
    reasons: list[str] = []

    def tell(metric: Metric) -> None:
        if isinstance(metric, UpdateDone):
            reasons.append(experiment.update.noise.reason or "")
            if metric.noise_scale is not None:
                seen.append(metric.noise_scale)

    Loop(experiment, tell=tell).run()
    later = seen[len(seen) // 2 :]
    least = min(asked or max(rows // PARTS, 1), max(rows // 2, 1))
    fixed, row = times_of(experiment, rows, least)
    if network is not None:
        fixed, row = fixed + _all_reduce(experiment, network), row / network.ranks
        least = min(least * network.ranks, rows)
    return TaskTrial(
        tradeoff=Tradeoff(
            noise=median(later) if later else float("nan"), batch=rows, fixed=fixed, row=row, least=least
        ),
        micro_batch=asked,
        num_updates=plan.updates,
        reason="" if later else (reasons[-1] if reasons else "") or "no signal was seen in the gradients",
    )


def times_of(experiment: Experiment, rows: int, least: int) -> tuple[float, float]:
    """Seconds of an update beside its rows, and of each row: the line through batches of `least` rows and of all.

    Both are run in turn, as the task cuts them, and not measured; weights go on changing.
    """
    update = experiment.update
    sizes = (least, rows)
    batches = [first_batch(experiment.task, batch=size, seed=experiment.settings.seed) for size in sizes]
    before, update.accumulator.noise = update.accumulator.noise, NOT_ASKED
    laps: list[list[float]] = [[], []]
    try:
        for _ in range(ROUNDS):
            for batch, spans in zip(batches, laps, strict=True):
                began = perf_counter()
                update(batch)
                if torch.accelerator.is_available():
                    torch.accelerator.synchronize()
                spans.append(perf_counter() - began)
    finally:
        update.accumulator.noise = before
    small, large = map(min, laps)  # other work on the machine only adds
    row = max((large - small) / max(sizes[1] - sizes[0], 1), 1e-9)
    return max(small - row * sizes[0], 0.0), row


def _all_reduce(experiment: Experiment, network: Network) -> float:
    trained = [parameter for parameter in experiment.update.parameters() if parameter.requires_grad]
    num_bytes = sum(parameter.nbytes for parameter in trained)
    one_pass = PassSeconds(rows=1, forward=1.0, backward=1.0, gradient_bytes=num_bytes, parameter_bytes=num_bytes)
    return one_pass.all_reduce(network)

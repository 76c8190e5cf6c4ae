"""What is shown while a run goes on: a progress bar on a terminal, plain lines elsewhere, nothing when quiet."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING, Any

from anybatch.app.records.schema import EpochDone, Metric, UpdateDone
from anybatch.display import plural

if TYPE_CHECKING:
    from anybatch.app.training.experiment import RunPlan

BATCH_NORM_NOTE = "BatchNorm takes its statistics from each micro-batch, so the gradient is not exactly the batch's"
SECONDS_BETWEEN_LINES = 10.0
"""Between two plain lines of an epoch that lasts."""


def say(text: str = "", *, is_quiet: bool = False) -> None:
    """One line on stdout, out at once."""
    if not is_quiet:
        print(printable(text), flush=True)


def printable(text: str) -> str:
    """`text`, with the bytes of file names that are no text by their number."""
    return text.encode("utf-8", "backslashreplace").decode()


@contextmanager
def screen_for(updates: int, done: int, *, is_quiet: bool) -> Iterator[Callable[[Metric], None]]:
    """A block in which each record given to its function is shown; the terminal is left as it was."""
    if is_quiet:
        yield lambda metric: None
    elif sys.stdout.isatty():
        with _bar(updates, done) as show:
            yield show
    else:
        yield _plain_lines(updates)


def _plain_lines(updates: int) -> Callable[[Metric], None]:
    """A line per epoch, and every ten seconds of a longer one."""
    last = monotonic()

    def show(metric: Metric) -> None:
        nonlocal last
        if isinstance(metric, EpochDone):
            say(epoch_line(metric))
        elif isinstance(metric, UpdateDone) and monotonic() - last > SECONDS_BETWEEN_LINES:
            say(f"update {metric.update}/{updates}  loss {metric.loss:.4f}  lr {metric.lr:.3g}")
        else:
            return
        last = monotonic()

    return show


@contextmanager
def _bar(updates: int, done: int) -> Iterator[Callable[[Metric], None]]:
    """A bar of updates with loss, rate and time left; epochs stay above it as lines."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        Task,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(f"{task.speed:.1f}/s" if task.speed else "-/s", style="dim")

    loss = TextColumn("loss {task.fields[loss]}")
    columns = (TextColumn("update"), BarColumn(), MofNCompleteColumn(), loss, Rate(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        bar = progress.add_task("", total=updates, completed=done, loss="-")

        def show(metric: Metric) -> None:
            if isinstance(metric, UpdateDone):
                progress.update(bar, completed=metric.update, loss=f"{metric.loss:.4f}")
            elif isinstance(metric, EpochDone):
                progress.console.print(epoch_line(metric), highlight=False, markup=False)

        yield show


def epoch_line(done: EpochDone) -> str:
    """An epoch in a line."""
    metrics = "".join(f"  {name} {value:.4f}" for name, value in done.metrics.items())
    losses = f"loss {done.train_loss:.4f} train {done.valid_loss:.4f} valid"
    return f"epoch {done.epoch}  update {done.update}  {losses}{metrics}  {done.seconds:.1f} s"


def plan_lines(plan: "RunPlan") -> list[str]:
    """The plan, in words."""
    cut = f"in {plan.micro_batches_per_update} micro-batches of up to {plan.micro_batch}"
    batch = f"{plan.batch} rows " + (cut if plan.micro_batches_per_update else f"cut by {plan.micro_batch}")
    ranks = "" if plan.parallel is None else f", {plural(plan.ranks, 'rank')} ({plan.parallel})"
    tail = plan.rows % plan.batch
    shorter = f", the last of each epoch {tail} rows" if tail and plan.rows > plan.batch else ""
    rule = "" if plan.lr_rule == "none" else f"  ({plan.lr_rule} rule, {plan.base_batch} -> {plan.batch} rows)"
    beta2 = "" if plan.beta2 is None else f", beta2 {plan.beta2:.6g}"
    shape = f"warm-up {plan.warmup} updates, decay {plan.decay}{beta2}"
    return [
        f"model   {plan.parameters:,} parameters on {plan.device}, {plan.precision}{ranks}",
        f"data    {plan.rows:,} rows to learn from, {plan.validation_rows:,} to validate on",
        f"batch   {batch}{shorter}",
        f"run     {plan.updates:,} updates, {plan.updates_per_epoch:,} per epoch, {plan.epochs} epochs",
        f"lr      first {plan.lr_first:.4g}, peak {plan.lr_peak:.4g}, ends at {plan.lr_last:.4g}{rule}",
        f"        {shape}" + ("" if plan.clip_norm is None else f", clipped to norm {plan.clip_norm:g}"),
        *([] if plan.batch_schedule is None else [f"        batches grow: {plan.batch_schedule}"]),
        *([f"note    {BATCH_NORM_NOTE}"] if plan.batch_norms and plan.micro_batches_per_update != 1 else []),
    ]


def summary_line(summary: Mapping[str, Any]) -> str:
    """The end of a run in a line."""
    return "  ".join(
        f"{name.replace('_', ' ')} {value:.4f}" if isinstance(value, float) else f"{name.replace('_', ' ')} {value}"
        for name, value in summary.items()
    )

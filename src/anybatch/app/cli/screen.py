"""Output on the terminal: progress of a run (a bar, plain lines or nothing), the plan and the summary in words."""

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
"""Time between plain lines within a long epoch."""


def say(text: str = "", *, is_quiet: bool = False) -> None:
    """Print one line on stdout and flush it."""
    if not is_quiet:
        print(printable(text), flush=True)


def printable(text: str) -> str:
    """Escape the bytes of file names that are not UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


@contextmanager
def screen_for(updates: int, done: int, *, is_quiet: bool) -> Iterator[Callable[[Metric], None]]:
    """Yield a function that shows each record it is given; the terminal is restored on exit."""
    if is_quiet:
        yield lambda metric: None
    elif sys.stdout.isatty():
        with _bar(updates, done) as show:
            yield show
    else:
        yield _plain_lines(updates)


def _plain_lines(updates: int) -> Callable[[Metric], None]:
    """Print a line per epoch, and one every ten seconds within an epoch."""
    last = monotonic()

    def show(metric: Metric) -> None:
        nonlocal last
        if isinstance(metric, EpochDone):
            say(_epoch_line(metric))
        elif isinstance(metric, UpdateDone) and monotonic() - last > SECONDS_BETWEEN_LINES:
            say(f"update {metric.update}/{updates}  loss {metric.loss:.4f}  lr {metric.lr:.3g}")
        else:
            return
        last = monotonic()

    return show


@contextmanager
def _bar(updates: int, done: int) -> Iterator[Callable[[Metric], None]]:
    """Show a bar of updates with loss, speed and time left; the lines of finished epochs scroll above it."""
    from rich import progress as rich
    from rich.text import Text

    class Speed(rich.ProgressColumn):
        def render(self, task: rich.Task) -> Text:
            return Text(f"{task.speed:.1f}/s" if task.speed else "-/s", style="dim")

    texts = rich.TextColumn("update"), rich.TextColumn("loss {task.fields[loss]}")
    columns = (texts[0], rich.BarColumn(), rich.MofNCompleteColumn(), texts[1], Speed(), rich.TimeRemainingColumn())
    with rich.Progress(*columns) as progress:
        bar = progress.add_task("", total=updates, completed=done, loss="-")

        def show(metric: Metric) -> None:
            if isinstance(metric, UpdateDone):
                progress.update(bar, completed=metric.update, loss=f"{metric.loss:.4f}")
            elif isinstance(metric, EpochDone):
                progress.console.print(_epoch_line(metric), highlight=False, markup=False)

        yield show


def _epoch_line(done: EpochDone) -> str:
    metrics = "".join(f"  {name} {value:.4f}" for name, value in done.metrics.items())
    losses = f"loss {done.train_loss:.4f} train {done.valid_loss:.4f} valid"
    return f"epoch {done.epoch}  update {done.update}  {losses}{metrics}  {done.seconds:.1f} s"


def plan_lines(plan: "RunPlan") -> list[str]:
    """Describe the plan of a run, one fact per line."""
    cut = f"in {plan.micro_batches_per_update} micro-batches of up to {plan.micro_batch}"
    batch = f"{plan.batch} rows " + (cut if plan.micro_batches_per_update else f"cut by {plan.micro_batch}")
    ranks = "" if plan.parallel is None else f", {plural(plan.ranks, 'rank')} ({plan.parallel})"
    tail = plan.rows % plan.batch
    shorter = f", the last of each epoch {tail} rows" if tail and plan.rows > plan.batch else ""
    rule = "" if plan.lr_rule == "none" else f"  ({plan.lr_rule} rule, {plan.base_batch} -> {plan.batch} rows)"
    beta2 = "" if plan.beta2 is None else f", beta2 {plan.beta2:.6g}"
    clip = "" if plan.clip_norm is None else f", clipped to norm {plan.clip_norm:g}"
    return [
        f"model   {plan.parameters:,} parameters on {plan.device}, {plan.precision}{ranks}",
        f"data    {plan.rows:,} rows to learn from, {plan.validation_rows:,} to validate on",
        f"batch   {batch}{shorter}",
        f"run     {plan.updates:,} updates, {plan.updates_per_epoch:,} per epoch, {plan.epochs} epochs",
        f"lr      first {plan.lr_first:.4g}, peak {plan.lr_peak:.4g}, ends at {plan.lr_last:.4g}{rule}",
        f"        warm-up {plan.warmup} updates, decay {plan.decay}{beta2}{clip}",
        *([] if plan.batch_schedule is None else [f"        batches grow: {plan.batch_schedule}"]),
        *([f"note    {BATCH_NORM_NOTE}"] if plan.batch_norms and plan.micro_batches_per_update != 1 else []),
    ]


def summary_line(summary: Mapping[str, Any]) -> str:
    """Join the final numbers of a run into one line."""
    return "  ".join(
        f"{name.replace('_', ' ')} {f'{value:.4f}' if isinstance(value, float) else value}"
        for name, value in summary.items()
    )

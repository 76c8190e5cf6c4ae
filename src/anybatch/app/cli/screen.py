"""What is shown while a run goes on: a progress bar on a terminal, plain lines elsewhere, nothing when quiet."""

import sys
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

from anybatch.app.records.schema import EpochDone, Metric, UpdateDone

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


class Screen(Protocol):
    """Shows a training run."""

    def __enter__(self) -> "Screen":
        """Begin."""

    def __exit__(self, *_: object) -> None:
        """Leave the terminal as it was."""

    def show(self, metric: Metric) -> None:
        """One record."""


def screen_for(updates: int, done: int, *, is_quiet: bool) -> Screen:
    """The right screen for this output."""
    if is_quiet:
        return SilentScreen()
    if sys.stdout.isatty():
        from anybatch.app.cli.progress_bar import BarScreen

        return BarScreen(updates, done)
    return PlainScreen(updates)


class SilentScreen:
    """Shows nothing."""

    def __enter__(self) -> "SilentScreen":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def show(self, metric: Metric) -> None:
        """Nothing."""


class PlainScreen(SilentScreen):
    """A line per epoch, and every ten seconds of a longer one."""

    def __init__(self, updates: int) -> None:
        self._updates = updates
        self._last = monotonic()

    def show(self, metric: Metric) -> None:
        """Print what is worth a line."""
        if isinstance(metric, EpochDone):
            say(epoch_line(metric))
        elif isinstance(metric, UpdateDone) and monotonic() - self._last > SECONDS_BETWEEN_LINES:
            say(f"update {metric.update}/{self._updates}  loss {metric.loss:.4f}  lr {metric.lr:.3g}")
        else:
            return
        self._last = monotonic()


def epoch_line(done: EpochDone) -> str:
    """An epoch in a line."""
    metrics = "".join(f"  {name} {value:.4f}" for name, value in done.metrics.items())
    losses = f"loss {done.train_loss:.4f} train {done.valid_loss:.4f} valid"
    return f"epoch {done.epoch}  update {done.update}  {losses}{metrics}  {done.seconds:.1f} s"


def plan_lines(plan: "RunPlan") -> list[str]:
    """The plan, in words."""
    cut = f"in {plan.micro_batches_per_update} micro-batches of up to {plan.micro_batch}"
    batch = f"{plan.batch} rows " + (cut if plan.micro_batches_per_update else f"cut by {plan.micro_batch}")
    ranks = (
        "" if plan.parallel is None else f", {plan.ranks} {'rank' if plan.ranks == 1 else 'ranks'} ({plan.parallel})"
    )
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


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligned columns, the first to the left, the others to the right.

    >>> table(["arm", "updates"], [["small", "630"], ["exact batch", "160"]])
    ['arm          updates', '-----------  -------', 'small            630', 'exact batch      160']
    """
    cells = [list(head), *map(list, rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    lines = [
        "  ".join(
            [
                row[0].ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
            ]
        ).rstrip()
        for row in cells
    ]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]

"""`anybatch compare`: four ways to train a task over several seeds, as tables and plain sentences."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from anybatch.app.cli.folders import begin, finish, first_record, recording_failure
from anybatch.app.cli.screen import say
from anybatch.app.records.schema import ArmEpoch, Comparison, at_epoch, over_runs
from anybatch.app.records.tolerant_reading import plain
from anybatch.app.training.settings import Settings
from anybatch.display import show_bytes, table
from anybatch.errors import SettingsError

if TYPE_CHECKING:
    from anybatch.app.lessons.arms import ArmPlan


def compare_command(task: str, settings: Settings, *, num_seeds: int, out: Path | None, is_quiet: bool) -> int:
    """Run the comparison, print it and write a run folder."""
    if num_seeds < 1:
        raise SettingsError(f"--seeds {num_seeds}: expected 1 or more.")
    folder, build = begin(task, out, "comparing four ways to train", is_quiet=is_quiet)
    from anybatch.app.lessons.arms import compare

    run = first_record("compare", task, settings)
    folder.write(run)

    def show(plan: "ArmPlan", seed: int, epoch: ArmEpoch) -> None:
        if epoch.epoch == plan.epochs:
            numbers = f"valid loss {epoch.valid_loss:.4f}  metric {epoch.metric:.4f}"
            say(f"{plan.name}, seed {seed}: after epoch {epoch.epoch}  {numbers}", is_quiet=is_quiet)

    with recording_failure(folder, run):
        comparison = compare(build, settings, num_seeds=num_seeds, tell=show)
    say("\n".join(["", *_comparison_lines(comparison), ""]), is_quiet=is_quiet)
    summary = {
        f"{arm.name} {comparison.metric}": at_epoch(arm, 0, lambda point: point.metric).mean for arm in comparison.arms
    }
    finish(folder, dataclasses.replace(run, summary=plain(summary)), comparison, is_quiet=is_quiet)
    return 0


def _comparison_lines(comparison: Comparison) -> list[str]:
    from anybatch.app.lessons.arms import show_spread

    metric = None if comparison.metric == "validation loss" else comparison.metric
    arms = comparison.arms

    def epoch_table(title: str, number: Callable[[ArmEpoch], float | None], metric: str | None) -> list[str]:
        rows = [
            [str(point.epoch), *(show_spread(at_epoch(arm, point.epoch, number), metric) for arm in arms)]
            for point in arms[0].runs[0].epochs
        ]
        return [f"{title} after each epoch", *table(["epoch", *(arm.name for arm in arms)], rows), ""]

    rows = []
    for arm in arms:
        first = arm.runs[0]
        cells = [arm.name, f"{arm.lr:.4g}", f"{first.updates:,}", f"{first.samples_seen:,}"]
        cells.append(show_spread(at_epoch(arm, 0, lambda point: point.valid_loss), None))
        cells.append(show_spread(at_epoch(arm, 0, lambda point: point.metric), metric))
        cells.append(f"{over_runs(arm, lambda run: run.seconds).mean:.2f} s")
        cells.append("-" if first.peak_bytes is None else show_bytes(first.peak_bytes))
        rows.append(cells)
    head = ["arm", "lr", "updates", "samples seen", "valid loss", comparison.metric, "time", "peak memory"]
    seeds = f"mean ± deviation over {len(arms[0].runs)} seeds" if len(arms[0].runs) > 1 else "one seed"
    return [
        *(f"{arm.name}: {arm.description}" for arm in arms),
        "",
        f"after the last epoch, {seeds}",
        *table(head, rows),
        "",
        *([] if metric is None else epoch_table(f"validation {metric}", lambda point: point.metric, metric)),
        *epoch_table("validation loss", lambda point: point.valid_loss, None),
        *(f"- {sentence}" for sentence in comparison.findings),
    ]

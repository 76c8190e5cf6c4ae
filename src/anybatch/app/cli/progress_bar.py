"""The progress bar of a training run on a terminal."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from anybatch.app.cli.screen import epoch_line
from anybatch.app.records.schema import EpochDone, Metric, UpdateDone


class _Rate(ProgressColumn):
    """Updates per second."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:.1f}/s" if task.speed else "-/s", style="dim")


class BarScreen:
    """A bar of updates with loss, rate and time left; epochs stay above it as lines."""

    def __init__(self, updates: int, done: int) -> None:
        self._console = Console()
        self._progress = Progress(
            TextColumn("update"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            _Rate(),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._bar = self._progress.add_task("", total=updates, completed=done, loss="-")

    def __enter__(self) -> "BarScreen":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, metric: Metric) -> None:
        """Move the bar, or print the epoch above it."""
        if isinstance(metric, UpdateDone):
            self._progress.update(self._bar, completed=metric.update, loss=f"{metric.loss:.4f}")
        elif isinstance(metric, EpochDone):
            self._console.print(epoch_line(metric), highlight=False, markup=False)

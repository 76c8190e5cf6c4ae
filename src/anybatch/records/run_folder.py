"""What a run leaves on disk, as frozen data: `run.json`, `metrics.jsonl`, `compare.json`, `trace.json`, `verify.json`.

Files are JSON and nothing else; inf and nan become null, which JSON has no other word for. Whole files are replaced in one
step, so a reader never sees half of one; a `metrics.jsonl` that a kill has cut off inside its last line is read up to there.
"""

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from anybatch.errors import RunError

Kind = Literal["train", "compare", "trace", "plan", "verify"]
Status = Literal["running", "finished", "stopped"]
Flat = Mapping[str, Any]
"""Names and plain values: what a table of settings shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """`run.json`: what was run, with what, and how it ended."""

    anybatch: str
    kind: Kind
    task: str
    created: str
    command: str
    seed: int
    versions: Flat
    git: str | None
    settings: Flat
    plan: Flat = field(default_factory=dict)
    status: Status = "running"
    summary: Flat = field(default_factory=dict)
    launch: str | None = None
    """The name of the launch of torchrun that runs it: restarted ranks find their run by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateDone:
    """One update."""

    event: ClassVar[str] = "update"
    update: int
    """Counted from 1."""
    epoch: int
    """Counted from 1."""
    loss: float
    grad_norm: float
    lr: float
    units: float
    rows: int
    micro_batches: int
    applied: bool
    seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The objective's metrics on the batch, before its step."""
    retries: int = 0
    """How often memory ran out in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochDone:
    """One pass over the training data and the validation after it."""

    event: ClassVar[str] = "epoch"
    epoch: int
    update: int
    """The last update of the epoch."""
    train_loss: float
    """Per unit, over the epoch's updates."""
    valid_loss: float
    metrics: Mapping[str, float]
    """The objective's metrics on the validation data."""
    train_metrics: Mapping[str, float]
    """The same while training, each update weighted by its units: of weights that were still changing."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """When one stage of an update ran, in seconds from the update's begin."""

    stage: str
    micro_batch: int | None
    start: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSeen:
    """The timeline of one update."""

    event: ClassVar[str] = "window"
    update: int
    stages: tuple[StageTime, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPoint:
    """Bytes in use at a moment of an update."""

    seconds: float
    bytes: int
    stage: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySeen:
    """Memory over the time of one update."""

    event: ClassVar[str] = "memory"
    update: int
    points: tuple[MemoryPoint, ...]
    peak_bytes: int


Metric = UpdateDone | EpochDone | WindowSeen | MemorySeen
"""One line of `metrics.jsonl`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmEpoch:
    """What one run of an arm had reached after an epoch."""

    epoch: int
    train_loss: float
    valid_loss: float
    metric: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmRun:
    """One seed of an arm."""

    seed: int
    updates: int
    samples_seen: int
    """Rows that some update learned from, counted once per epoch."""
    seconds: float
    peak_bytes: int | None
    epochs: tuple[ArmEpoch, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way of training, over several seeds."""

    name: str
    description: str
    batch: int
    micro_batch: int
    lr: float
    runs: tuple[ArmRun, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """`compare.json`: the arms and what was found."""

    metric: str
    arms: tuple[Arm, ...]
    findings: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStage:
    """One stage of the traced update; `micro_batch` is None for the whole batch."""

    stage: str
    micro_batch: int | None
    title: str
    facts: Mapping[str, str | float]
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedLayer:
    """One layer that the sample went through; shapes of all tensors in and out."""

    name: str
    kind: str
    shapes_in: tuple[tuple[int, ...], ...]
    shapes_out: tuple[tuple[int, ...], ...]
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """`trace.json`: one update stage by stage, and one sample layer by layer."""

    stages: tuple[TracedStage, ...]
    layers: tuple[TracedLayer, ...]


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A folder with the files of one run."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        """Where the run's checkpoints are."""
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        """The run's `metrics.jsonl`."""
        return self.path / "metrics.jsonl"

    def write_run(self, run: Run) -> None:
        """Replace `run.json`."""
        self.path.mkdir(parents=True, exist_ok=True)
        _replace(self.path / "run.json", to_json(run, indent=2))

    def read_run(self) -> Run:
        """The run's `run.json`."""
        path = self.path / "run.json"
        if not path.is_file():
            raise RunError(
                f"{self.path} is not a run folder: it has no run.json. Give a folder that anybatch train, compare or trace "
                "has written, such as runs/digits-20261115-120000."
            )
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            return Run(**found)
        except (ValueError, TypeError) as error:
            raise RunError(
                f"{path} is not the run.json of an anybatch run ({error}). Give the folder of another run."
            ) from error

    def append(self, metric: Metric) -> None:
        """Add one line to `metrics.jsonl`, out of this process's hands when the call returns."""
        line = json.dumps({"event": metric.event} | plain(metric), allow_nan=False)
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def read_metrics(self) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl`, up to one that a kill has cut off."""
        return [json.loads(line) for line in self._whole_lines()]

    def rewind(self, update: int) -> None:
        """Forget what `metrics.jsonl` says of updates after `update`: they will run again."""
        kept = [line for line in self._whole_lines() if json.loads(line)["update"] <= update]
        _replace(self.metrics, "".join(line + "\n" for line in kept))

    def write_comparison(self, comparison: Comparison) -> None:
        """Replace `compare.json`."""
        _replace(self.path / "compare.json", to_json(comparison, indent=1))

    def write_trace(self, trace: Trace) -> None:
        """Replace `trace.json`."""
        _replace(self.path / "trace.json", to_json(trace, indent=1))

    def write_verdict(self, verdict: Mapping[str, Any]) -> None:
        """Replace `verify.json`."""
        _replace(self.path / "verify.json", to_json(verdict, indent=1))

    def write_plan(self, plan: Mapping[str, Any]) -> None:
        """Replace `plan.json`."""
        _replace(self.path / "plan.json", to_json(plan, indent=1))

    def _whole_lines(self) -> Iterable[str]:
        if not self.metrics.is_file():
            return
        for line in self.metrics.read_text(encoding="utf-8").splitlines():
            try:
                json.loads(line)
            except ValueError:
                return
            yield line


_SHORT = {"shapes_in": "in", "shapes_out": "out"}
"""Fields whose JSON name is a word that Python keeps for itself."""


def plain(value: Any) -> Any:
    """`value` as JSON knows it: dataclasses become dicts, tuples lists, inf and nan None."""
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return {_SHORT.get(item.name, item.name): plain(getattr(value, item.name)) for item in fields}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


def to_json(value: Any, indent: int | None = None) -> str:
    """`value` as JSON text that any reader takes.

    >>> to_json(MemoryPoint(seconds=float("nan"), bytes=3, stage="load"))
    '{"seconds": null, "bytes": 3, "stage": "load"}'
    """
    return json.dumps(plain(value), indent=indent, allow_nan=False, ensure_ascii=False)


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)

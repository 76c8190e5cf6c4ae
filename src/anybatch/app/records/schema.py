"""The records that a run leaves on disk, each a frozen dataclass: the one definition that writers and readers share.

A field's type says what a reader may count on. A plain `int` or `float` is always there: a record without it is left out.
Where the type allows None, None stands for a number that is missing or was not finite, because JSON knows neither inf nor nan.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from anybatch.display import html_block, html_table, sentences, short

RunKind = Literal["train", "compare", "trace", "plan", "verify"]
Scalar = str | int | float | bool | None
Scalars = Mapping[str, Scalar]
"""Names and plain values: what a table of settings shows."""
Numbers = Mapping[str, float | None]
Values = tuple["str | int | float | bool | Values | None", ...]
"""Sample values of a tensor, nested as the tensor is."""
Shapes = tuple[tuple[int | str, ...], ...]
"""The shapes of several tensors."""
JSON_NAMES = {"shapes_in": "in", "shapes_out": "out"}
"""Fields whose name in JSON is a word that Python keeps for itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run: its settings, and how it ended."""

    file: ClassVar[str] = "run.json"
    anybatch: str
    kind: str  # one of `RunKind`
    task: str
    created: str
    command: str
    seed: Scalar
    versions: Scalars
    git: str | None
    settings: Scalars
    plan: Scalars = field(default_factory=dict)
    status: str = "running"  # running, finished, stopped (by someone) or failed (by itself)
    reason: str = ""  # why it stopped or failed, in a line
    task_hash: str | None = None  # SHA-256 of the task's file at the latest start; None for a built-in task
    summary: Scalars = field(default_factory=dict)
    launch: str | None = None  # the name of torchrun's launch: ranks that torchrun restarts find their run by it


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateDone:
    event: ClassVar[str] = "update"
    update: int  # counted from 1
    epoch: int | None
    loss: float | None
    grad_norm: float | None
    lr: float | None
    units: float | None
    rows: int | None
    micro_batches: int | None
    applied: bool = True
    seconds: float | None
    metrics: Numbers = field(default_factory=dict)  # the objective's metrics on the batch, before its step
    retries: int | None = 0  # how often memory ran out in it
    noise_scale: float | None = None  # in rows, from the latest measured updates; None: not known, or no signal seen
    noise_low: float | None = None
    noise_high: float | None = None  # its 90 % interval; None above, where the signal is not told from 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochDone:
    """One pass over the training data and the validation after it."""

    event: ClassVar[str] = "epoch"
    epoch: int
    update: int | None  # the last update of the epoch
    train_loss: float | None  # per unit, over the epoch's updates
    valid_loss: float | None
    metrics: Numbers  # the objective's metrics on the validation data
    train_metrics: Numbers  # the same while training, each update weighted by its units
    seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """When one stage of an update ran, in seconds from the update's begin."""

    stage: str
    micro_batch: int | None  # None for a stage that runs once per update
    start: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchSeen:
    """One micro-batch, and its weight in the batch's loss."""

    rows: int
    units: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSeen:
    """The timeline of one update."""

    event: ClassVar[str] = "window"
    update: int
    stages: tuple[StageTime, ...]
    micro_batches: tuple[MicroBatchSeen, ...] = ()  # empty where the loss is one over all rows, which has no shares

    @property
    def seconds(self) -> float:
        """The end of the stage that ended last."""
        return max((stage.start + stage.seconds for stage in self.stages), default=0.0)


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
    peak_bytes: int | None


Metric = UpdateDone | EpochDone | WindowSeen | MemorySeen
"""One line of `metrics.jsonl`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeRecord:
    """The predicted peak of one micro-batch size, which counts rows or tokens."""

    size: int
    peak: int
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FittingChange:
    """A change that would take less, its predicted peak in bytes, and whether it fits."""

    change: str
    peak: int
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecord:
    """Memory of an update in bytes, as `plan` predicted it."""

    file: ClassVar[str] = "plan.json"
    unit: str = "rows"
    micro_batch: int | None  # the largest that fits; 0 where not even one row does
    peak_bytes: int | None
    rows: int | None
    whole_size: int | None
    whole_bytes: int | None
    least_bytes: int | None
    memory: int | None
    margin: float | None
    device: str
    sizes: tuple[SizeRecord, ...]
    breakdown: Numbers  # parts of the peak at the size chosen
    checkpointing: Scalars | None  # changes by gradient checkpointing; None where it was not tried
    sums: str = "fp32"  # the precision in which gradients are summed
    ways_to_fit: tuple[FittingChange, ...] = ()
    method: str
    reason: str
    is_confirmed: bool
    notes: tuple[str, ...]
    limit: int | None
    fits: bool
    needs_accumulation: bool
    sentences: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterRecord:
    """The error of one parameter's gradient, and what the order of summation explains of it."""

    name: str
    error: float | None
    floor: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CutRecord:
    """One cut of the batch in one precision."""

    name: str
    precision: str
    micro_batches: int | None
    rows: Values  # how many rows each micro-batch had
    error: float | None
    parameters: tuple[ParameterRecord, ...]
    failure: str | None  # the error, where this cut could not run
    is_exact: bool
    decides: bool = True  # False for a cut that nobody trains with: a note


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsRecord:
    """The weight of a micro-batch's rows, and the weight that they should have."""

    rows: Values  # their numbers in the batch
    weight: float | None
    wanted: float | None
    counted: float | None  # how often each row counted: 1 is right, None is not known


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseRecord:
    """Why a gradient was not exact, and what to do."""

    kind: str
    explanation: str
    fix: str
    lesson: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofRecord:
    """The accumulated gradient against the whole batch's: what `verify` found."""

    file: ClassVar[str] = "verify.json"
    finding: str = ""  # "exact", "not exact" or "could not be judged"
    is_exact: bool
    error: float | None
    rows: int | None
    rows_given: int | None
    dtype: str = "own precision"
    cuts: tuple[CutRecord, ...]
    causes: tuple[CauseRecord, ...]
    notes: tuple[str, ...]
    unjudged: str = ""  # why it could not be judged, where it could not
    weights: tuple[RowsRecord, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStage:
    """One stage of the traced update; `micro_batch` is None for the whole batch."""

    stage: str
    micro_batch: int | None
    title: str
    facts: Scalars
    values: Values


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedLayer:
    """One layer that the sample went through, with the shapes of all tensors that went in and came out."""

    name: str
    kind: str
    shapes_in: Shapes
    shapes_out: Shapes
    values: Values


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedImage:
    """The sample as an image: rows of pixels from top to bottom, each one number (grey) or three, from 0 to 255."""

    width: int
    height: int
    channels: int
    pixels: Values


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One update stage by stage, and one sample layer by layer."""

    file: ClassVar[str] = "trace.json"
    stages: tuple[TracedStage, ...]
    layers: tuple[TracedLayer, ...]
    images: tuple[TracedImage, ...] = ()  # the sample, where it is an image; else nothing

    def __repr__(self) -> str:
        return f"Trace({len(self.stages)} stages, {len(self.layers)} layers)"

    def _repr_html_(self) -> str:
        stages = [
            [
                each.stage,
                "all" if each.micro_batch is None else each.micro_batch,
                each.title,
                ", ".join(
                    f"{name} {fact if isinstance(fact, str) else short(fact)}" for name, fact in each.facts.items()
                ),
            ]
            for each in self.stages
        ]
        layers = [[each.name, each.kind, each.shapes_in, each.shapes_out] for each in self.layers]
        return html_block(
            "One update, stage by stage",
            html_table(["stage", "micro-batch", "what", "numbers"], stages),
            sentences(["One sample, layer by layer:"]),
            html_table(["layer", "kind", "in", "out"], layers),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmEpoch:
    """One run of an arm after an epoch."""

    epoch: int
    train_loss: float | None
    valid_loss: float | None
    metric: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmRun:
    """One seed of an arm."""

    seed: Scalar
    updates: int | None
    samples_seen: int | None  # rows that some update learned from, counted once per epoch
    seconds: float | None
    peak_bytes: int | None
    epochs: tuple[ArmEpoch, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way of training, over several seeds."""

    name: str
    description: str
    batch: int | None
    micro_batch: int | None
    lr: float | None
    runs: tuple[ArmRun, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The arms, and what was found."""

    file: ClassVar[str] = "compare.json"
    metric: str = "metric"
    arms: tuple[Arm, ...]
    findings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Spread:
    """A mean over seeds, and the sample deviation (n - 1), which one seed does not have."""

    mean: float | None
    deviation: float | None


def spread_of(values: Iterable[float | None]) -> Spread:
    """The mean and deviation of what is known; nan counts as known, because a run that diverged has said something.

    >>> spread_of([1.0, 3.0, None]), spread_of([2.0]), spread_of([])
    (Spread(mean=2.0, deviation=1.4142135623730951), Spread(mean=2.0, deviation=None), Spread(mean=None, deviation=None))
    """
    known = [value for value in values if value is not None]
    if not known:
        return Spread(None, None)
    mean = sum(known) / len(known)
    if len(known) == 1:
        return Spread(mean, None)
    return Spread(mean, math.sqrt(sum((value - mean) ** 2 for value in known) / (len(known) - 1)))


def over_runs(arm: Arm, number: Callable[[ArmRun], float | None]) -> Spread:
    """One number of each run of an arm."""
    return spread_of(number(run) for run in arm.runs)


def at_epoch(arm: Arm, epoch: int, number: Callable[[ArmEpoch], float | None]) -> Spread:
    """One number of an epoch of each run of an arm; 0 stands for the last epoch."""
    points = (point for run in arm.runs for point in (run.epochs if epoch else run.epochs[-1:]))
    return spread_of(number(point) for point in points if epoch in (0, point.epoch))

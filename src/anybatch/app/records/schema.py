"""Records that a run writes to disk, one frozen dataclass each, shared by writers and readers.

A plain `int` or `float` field is always there: a record without it is not read. In a field that may be None, None stands for a
number that is missing or not finite, because JSON has neither inf nor nan.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from anybatch.display import html_block, html_table, sentences, short

RunKind = Literal["train", "compare", "trace", "plan", "verify"]
Scalar = str | int | float | bool | None
Scalars = Mapping[str, Scalar]  # rows of a table: names and plain values
Numbers = Mapping[str, float | None]
Values = tuple["str | int | float | bool | Values | None", ...]  # sample values of a tensor, nested like the tensor
Shapes = tuple[tuple[int | str, ...], ...]  # shapes of several tensors
JSON_NAMES = {"shapes_in": "in", "shapes_out": "out"}  # names of fields in JSON, if they are keywords of Python


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Settings and outcome of a run."""

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
    status: str = "running"  # running, finished, stopped by a person, or failed
    reason: str = ""  # why it stopped or failed, in one line
    task_hash: str | None = None  # SHA-256 of the task's file at the last start; None for a built-in task
    summary: Scalars = field(default_factory=dict)
    launch: str | None = None  # torchrun's name of the launch: restarted ranks find their run by it


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
    metrics: Numbers = field(default_factory=dict)  # of the batch, before its step
    retries: int | None = 0  # number of out-of-memory errors
    noise_scale: float | None = None  # in rows, from the last measured updates; None if unknown
    noise_low: float | None = None  # 90 % interval
    noise_high: float | None = None  # None for an open interval


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochDone:
    """One pass over the training data and the validation after it."""

    event: ClassVar[str] = "epoch"
    epoch: int
    update: int | None  # last update of the epoch
    train_loss: float | None  # per unit, over the epoch's updates
    valid_loss: float | None
    metrics: Numbers  # of the validation data
    train_metrics: Numbers  # of the updates, weighted by their units
    seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """Time of one stage, in seconds from the start of its update."""

    stage: str
    micro_batch: int | None  # None for a stage that runs once per update
    start: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchSeen:
    rows: int
    units: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSeen:
    event: ClassVar[str] = "window"
    update: int
    stages: tuple[StageTime, ...]
    micro_batches: tuple[MicroBatchSeen, ...] = ()  # empty for a coupled loss, which has no shares

    @property
    def seconds(self) -> float:
        return max((stage.start + stage.seconds for stage in self.stages), default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPoint:
    seconds: float
    bytes: int
    stage: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySeen:
    event: ClassVar[str] = "memory"
    update: int
    points: tuple[MemoryPoint, ...]
    peak_bytes: int | None


Metric = UpdateDone | EpochDone | WindowSeen | MemorySeen  # one line of `metrics.jsonl`


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeRecord:
    size: int  # rows or tokens
    peak: int
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FittingChange:
    change: str
    peak: int  # predicted bytes
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecord:
    """Memory of an update in bytes, predicted by `plan`."""

    file: ClassVar[str] = "plan.json"
    unit: str = "rows"
    micro_batch: int | None  # the largest that fits; 0 if not even one row does
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
    checkpointing: Scalars | None  # None if gradient checkpointing was not tried
    sums: str = "fp32"  # dtype in which gradients are summed
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
    """Error of one parameter's gradient, and the part that summation order explains."""

    name: str
    error: float | None
    floor: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CutRecord:
    """One split of the batch in one precision."""

    name: str
    precision: str
    micro_batches: int | None
    rows: Values  # of each micro-batch
    error: float | None
    parameters: tuple[ParameterRecord, ...]
    failure: str | None  # the error, if it could not run
    is_exact: bool
    decides: bool = True  # False for a split that is only a note


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsRecord:
    """Weight of a micro-batch's rows, and the correct weight."""

    rows: Values  # numbers in the batch
    weight: float | None
    wanted: float | None
    counted: float | None  # how often each row counted; 1 is correct


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseRecord:
    kind: str
    explanation: str
    fix: str
    lesson: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofRecord:
    """Result of `verify`: the accumulated gradient against the whole batch's."""

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
    unjudged: str = ""  # why it could not be judged
    weights: tuple[RowsRecord, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStage:
    stage: str
    micro_batch: int | None
    title: str
    facts: Scalars
    values: Values


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedLayer:
    name: str
    kind: str
    shapes_in: Shapes
    shapes_out: Shapes
    values: Values


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedImage:
    """The sample as an image: rows of pixels from top to bottom, each one number (grey) or three, 0 to 255."""

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
    images: tuple[TracedImage, ...] = ()  # the sample, if it is an image

    def __repr__(self) -> str:
        return f"Trace({len(self.stages)} stages, {len(self.layers)} layers)"

    def _repr_html_(self) -> str:
        stages = []
        for each in self.stages:
            facts = [f"{name} {fact if isinstance(fact, str) else short(fact)}" for name, fact in each.facts.items()]
            place = "all" if each.micro_batch is None else each.micro_batch
            stages.append([each.stage, place, each.title, ", ".join(facts)])
        layers = [[each.name, each.kind, each.shapes_in, each.shapes_out] for each in self.layers]
        return html_block(
            "One update, stage by stage",
            html_table(["stage", "micro-batch", "what", "numbers"], stages),
            sentences(["One sample, layer by layer:"]),
            html_table(["layer", "kind", "in", "out"], layers),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmEpoch:
    epoch: int
    train_loss: float | None
    valid_loss: float | None
    metric: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmRun:
    seed: Scalar
    updates: int | None
    samples_seen: int | None  # rows of all updates
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
    file: ClassVar[str] = "compare.json"
    metric: str = "metric"
    arms: tuple[Arm, ...]
    findings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean over seeds, and the sample deviation (n - 1), which one seed does not have."""

    mean: float | None
    deviation: float | None


def spread_of(values: Iterable[float | None]) -> Spread:
    """Return the mean and deviation of the values that are not None; nan counts, because a diverged run is a result.

    >>> spread_of([1.0, 3.0, None]), spread_of([2.0]), spread_of([])
    (Spread(mean=2.0, deviation=1.4142135623730951), Spread(mean=2.0, deviation=None), Spread(mean=None, deviation=None))
    """
    known = [value for value in values if value is not None]
    mean = sum(known) / len(known) if known else None
    if mean is None or len(known) == 1:
        return Spread(mean, None)
    return Spread(mean, math.sqrt(sum((value - mean) ** 2 for value in known) / (len(known) - 1)))


def over_runs(arm: Arm, number: Callable[[ArmRun], float | None]) -> Spread:
    return spread_of(number(run) for run in arm.runs)


def at_epoch(arm: Arm, epoch: int, number: Callable[[ArmEpoch], float | None]) -> Spread:
    """Return the spread of one number over the runs of an arm at an epoch; 0 is the last."""
    points = (point for run in arm.runs for point in (run.epochs if epoch else run.epochs[-1:]))
    return spread_of(number(point) for point in points if epoch in (0, point.epoch))

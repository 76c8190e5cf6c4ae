"""What a finished run left behind, as frozen data: the one thing that every chart, table and sentence is made from.

None stands for a number that is missing or was not finite.
"""

from collections.abc import Mapping
from dataclasses import dataclass

Scalar = str | int | float | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """`run.json`: what was asked for, with which versions, and how it ended."""

    kind: str
    task: str
    status: str
    anybatch: str
    created: str
    command: str
    seed: Scalar
    git: str | None
    versions: Mapping[str, Scalar]
    settings: Mapping[str, Scalar]
    plan: Mapping[str, Scalar]
    summary: Mapping[str, Scalar]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatePoint:
    """One update of the training trace."""

    update: int
    epoch: int | None
    loss: float | None
    grad_norm: float | None
    lr: float | None
    rows: int | None
    micro_batches: int | None
    applied: bool
    seconds: float | None
    metrics: Mapping[str, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochPoint:
    """One epoch of the training trace; `update` is its last one."""

    epoch: int
    update: int | None
    train_loss: float | None
    valid_loss: float | None
    metrics: Mapping[str, float | None]
    train_metrics: Mapping[str, float | None]
    seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One stage of one update: when it started, in seconds, and how long it took."""

    stage: str
    micro_batch: int | None
    start: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The window of one update; its first span starts at 0."""

    update: int
    spans: tuple[Span, ...]

    @property
    def seconds(self) -> float:
        """From the first start to the last end."""
        return max((span.start + span.seconds for span in self.spans), default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPoint:
    """Memory in use at one moment."""

    seconds: float
    num_bytes: float
    stage: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCurve:
    """Memory over the course of one update."""

    update: int
    points: tuple[MemoryPoint, ...]
    peak_bytes: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmEpoch:
    """One epoch of one seed of one arm."""

    epoch: int
    train_loss: float | None
    valid_loss: float | None
    metric: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmRun:
    """One seed of one arm."""

    seed: Scalar
    updates: int | None
    samples_seen: int | None
    seconds: float | None
    peak_bytes: float | None
    epochs: tuple[ArmEpoch, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to train, over several seeds."""

    name: str
    description: str
    batch: int | None
    micro_batch: int | None
    lr: float | None
    runs: tuple[ArmRun, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """`compare.json`: the arms together."""

    metric: str
    arms: tuple[Arm, ...]
    findings: tuple[str, ...]


Values = tuple["str | int | float | bool | Values | None", ...]
"""Sample values of a tensor, nested as the tensor is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One stage of the pipeline trace."""

    stage: str
    micro_batch: int | None
    title: str
    facts: Mapping[str, Scalar]
    values: Values


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer of the prediction trace."""

    name: str
    kind: str
    shapes_in: str
    shapes_out: str
    values: Values


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """`trace.json`: one update stage by stage, and one sample layer by layer."""

    steps: tuple[Step, ...]
    layers: tuple[Layer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterError:
    """The error of one parameter's gradient, and what the order of summation explains of it."""

    name: str
    error: float | None
    """None where it is not finite."""
    floor: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CutResult:
    """One cut of the batch in one precision."""

    name: str
    precision: str
    micro_batches: int | None
    error: float | None
    is_exact: bool
    failure: str
    parameters: tuple[ParameterError, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why a gradient was not exact, and what to do."""

    kind: str
    explanation: str
    fix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """`verify.json`: the accumulated gradient against the whole batch's."""

    is_exact: bool
    rows: int | None
    rows_given: int | None
    dtype: str
    cuts: tuple[CutResult, ...]
    causes: tuple[Cause, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakPlan:
    """`plan.json`: what an update needs, predicted."""

    unit: str
    micro_batch: int | None
    limit: float | None
    sizes: tuple[tuple[float, float], ...]
    """(micro-batch, peak in bytes), smallest first."""
    parts: Mapping[str, float | None]
    """What the peak at the size chosen is made of, in bytes."""
    sentences: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """All that a run folder holds."""

    run: Run
    updates: tuple[UpdatePoint, ...] = ()
    epochs: tuple[EpochPoint, ...] = ()
    timelines: tuple[Timeline, ...] = ()
    memory: tuple[MemoryCurve, ...] = ()
    comparison: Comparison | None = None
    walk: Walk | None = None
    proof: Proof | None = None
    peak_plan: PeakPlan | None = None
    num_unreadable: int = 0
    """Lines of `metrics.jsonl` that are no JSON object: what a kill in the middle of a write leaves."""

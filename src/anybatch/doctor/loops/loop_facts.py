"""What was seen of a training loop, as values: passes, updates, what was lost, what happened in between."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

CRITERIA = (
    "NllLoss",
    "MseLoss",
    "BinaryCrossEntropy",
    "SmoothL1Loss",
    "HuberLoss",
    "SoftMarginLoss",
    "MultiMarginLoss",
    "MultilabelMarginLoss",
    "CtcLoss",
    "KlDiv",
)
"""How torch's autograd nodes of losses begin, which reduce over their terms themselves."""
Probe = Mapping[str, tuple[float, ...]]
"""Some numbers of some gradients, by parameter."""


@dataclass(frozen=True, slots=True)
class Spot:
    """A line of the user's code."""

    file: str = ""
    line: int = 0
    function: str = ""
    via: str = ""
    chain: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerm:
    """One mean or sum within a loss, and the weight that backward gave it."""

    role: str
    kind: str
    weight: float
    counts: tuple[float, ...]
    """How many terms it took together; several where a sum may be counted in several ways."""
    pairs: int = 0
    """Rows of a square of logits whose targets are each row once: a contrastive loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossPass:
    """One call of backward."""

    serial: int
    index: int
    """Its place in the log."""
    seconds: float
    spot: Spot
    loss: float | None
    terms: tuple[LossTerm, ...]
    touched: frozenset[int]
    batch: tuple[int, int, int] | None
    """Loader, epoch and number of the batch that was fetched last."""
    rows: int | None
    mark: float | None
    """A number that tells the rows of one batch from those of another; of many ranks only."""
    scale: float | None
    sync: tuple[bool, bool] | None
    """Whether ranks were to synchronise, as it stood at forward and at backward."""
    probe: Probe = field(repr=False)
    is_retained: bool = False
    is_eval: bool = False
    dtypes: tuple[str, ...] = ()
    norms: Mapping[str, Any] | None = None
    norm_forwards: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """Anything that is neither a pass nor a step: clip, schedule, unscale, scaler-update, zero, cleared, modified."""

    kind: str
    index: int
    seconds: float
    spot: Spot
    parameters: frozenset[int] = frozenset()
    facts: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopUpdate:
    """One step of one optimizer, and what it was made of."""

    number: int
    """1 for the first of this optimizer."""
    optimizer: int
    index: int
    seconds: float
    spot: Spot
    passes: tuple[LossPass, ...]
    """In the gradients for the first time."""
    stale: tuple[int, ...]
    """Passes that were stepped on before, and never cleared."""
    happenings: tuple[Happening, ...]
    """Since the step before of this optimizer."""
    lr: tuple[float, ...]
    probe: Probe = field(repr=False)
    is_assigned: bool = False
    """Somebody wrote to the gradients other than backward, clipping and unscaling."""
    is_in_scaler: bool = False
    is_empty: bool = False
    """No parameter had a gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A pass that no step ever used."""

    loss_pass: LossPass
    spot: Spot
    """Where it was cleared; the pass itself where it was left at the end."""
    index: int
    is_left: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedLoop:
    """Everything that one process told."""

    rank: int
    world: int
    optimizers: Mapping[int, Mapping[str, Any]]
    passes: tuple[LossPass, ...]
    updates: tuple[LoopUpdate, ...]
    lost: tuple[Lost, ...]
    happenings: tuple[Happening, ...]
    epochs: tuple[Mapping[str, Any], ...]
    intended: Mapping[str, int]
    """Variables that look like the number of micro-batches."""
    intended_epochs: Mapping[str, int]
    lengths: Mapping[str, int]
    """Of lists in the user's variables: perhaps batches."""
    others: Mapping[str, tuple[Mapping[str, Any], ...]]
    """Lines that are taken as they are: kept, unowned, trouble, read."""
    reason: str

    def updates_of(self, optimizer: int) -> tuple[LoopUpdate, ...]:
        """In order."""
        return tuple(update for update in self.updates if update.optimizer == optimizer)


def spot_of(place: Any) -> Spot:
    """From the log."""
    if not isinstance(place, Mapping):
        return Spot()
    text = {name: str(place.get(name, "")) for name in ("file", "function", "via", "chain")}
    line = place.get("line", 0)
    return Spot(line=line if isinstance(line, int) else 0, **text)

"""A task: a model, how it learns, from what, and how it is judged."""

from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import nn
from torch.optim import Optimizer

from anybatch.app.training.settings import Decay, LRRule
from anybatch.core import BatchNorm, Coupled, Objective, Split
from anybatch.display import one_of
from anybatch.errors import TaskError


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """All that a training run needs; a task file is a Python file with a function `task()` that returns one.

    `task()` is called after the seed is set, so that the same seed makes the same model. The numbers are defaults, which
    the command line may override.
    """

    model: nn.Module
    optimizer: Optimizer
    objective: Objective | Coupled
    training: Any
    """A map-style dataset: `len()` and `[row]`. Shuffled anew each epoch."""
    validation: Any
    """Likewise; read in order."""
    metric: str | None = None
    """Which of the objective's metrics the task is judged by, higher is better; None: the validation loss."""
    collate: Callable[[list[Any]], Any] | None = None
    """How rows become a batch; None: as `torch.utils.data.default_collate` does."""
    batch_size: int = 64
    batch_schedule: Mapping[int, int] | Literal["noise"] | None = None
    """Batches that grow: rows by the first epoch that has them, such as `{1: 32, 4: 64}`; "noise" doubles `batch_size` when the
    noise scale is surely that large. `lr_rule` and beta2 follow. A batch size that the run is asked for stays what it is."""
    micro_batch: int = 16
    """Rows that are held in memory at once."""
    split: Split | None = None
    """How a batch is cut if the run was not asked for a number of rows; None cuts it into `micro_batch` rows."""
    lengths: Sequence[int] | Callable[[Any], Sequence[int]] | None = None
    """How long each row of `training` is, or a function of it that says so: ranks get rows of equal work then, not as many."""
    batch_norm: BatchNorm | None = None
    """How BatchNorm layers see a batch that is cut, as in `Accumulator`; None warns of what is lost."""
    epochs: int = 10
    base_batch: int | None = None
    """The batch that the optimizer's learning rate was chosen for; None: `batch_size`."""
    lr_rule: LRRule = "none"
    warmup: int = 0
    """Updates over which the learning rate rises."""
    decay: Decay = "none"
    clip_norm: float | None = None
    validation_batch: int = 256
    """Rows that are validated at a time; without gradients far more fit than while training."""

    @property
    def whole_objective(self) -> Objective:
        """The objective of a batch that is not cut."""
        return self.objective.whole()

    def __post_init__(self) -> None:
        for name, kinds in (("model", (nn.Module,)), ("optimizer", (Optimizer,)), ("objective", (Objective, Coupled))):
            value = getattr(self, name)
            if not isinstance(value, kinds):
                text, expected = repr(value), " or ".join(kind.__name__ for kind in kinds)
                text = text if len(text) <= 80 else text[:77] + "..."
                raise TaskError(f"Task({name}=...) got a {type(value).__name__}: {text}; expected a {expected}.")
        for name in ("training", "validation"):
            dataset = getattr(self, name)
            if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
                raise TaskError(
                    f"Task({name}=...) got a {type(dataset).__name__}: expected a dataset with len() and [row], such as "
                    "torch.utils.data.TensorDataset(inputs, targets). A DataLoader is not needed: batches are made for you."
                )
            if len(dataset) == 0:
                raise TaskError(f"Task({name}=...) got a dataset with 0 rows; give at least 1.")
        for name in ("batch_size", "micro_batch", "epochs", "validation_batch"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise TaskError(f"Task({name}={value!r}): expected a whole number, 1 or more.")
        for name, choices in (("lr_rule", LRRule), ("decay", Decay)):
            value = getattr(self, name)
            if value not in get_args(choices):
                raise TaskError(f"Task({name}={value!r}): {one_of(value, get_args(choices))}")

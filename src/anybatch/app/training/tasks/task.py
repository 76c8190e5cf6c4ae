"""A training task."""

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
    """A model, its optimizer and objective, the data, and defaults for the command line.

    A task file is a Python file with a function `task()` that returns one. `task()` is called after the seed is set, so that
    the same seed makes the same model.

    Args:
        model: The model to train.
        optimizer: Its optimizer, without a scheduler.
        objective: The loss, such as `supervised(nn.CrossEntropyLoss())`.
        training: A map-style dataset with `len()` and `[row]`; shuffled anew each epoch.
        validation: Another one, read in order.
        metric: Metric of the objective that the task is judged by, higher is better; None: the validation loss.
        collate: Turns a list of rows into a batch; None: `torch.utils.data.default_collate`.
        batch_size: Rows of a batch.
        batch_schedule: Batch sizes by the first epoch that has them, such as `{1: 32, 4: 64}`. "noise" doubles `batch_size`
            when the noise scale is surely that large. `lr_rule` and beta2 follow. `--batch-size` overrides it.
        micro_batch: Rows that are held in memory at once.
        split: Split for batches, unless `--micro-batch` is given; None: `Rows(micro_batch)`.
        lengths: Length of each training row, or a function of `training` that returns them: ranks then get rows of equal
            work instead of equally many.
        batch_norm: Treatment of BatchNorm, as in `Accumulator`; None warns of inexact statistics.
        epochs: Passes over the training data.
        base_batch: Batch size that the optimizer's learning rate was chosen for; None: `batch_size`.
        lr_rule: Rule of `scale_lr` from `base_batch` to the batch size of the run.
        warmup: Updates with a rising learning rate.
        decay: Decay after the warm-up: "none", "linear" or "cosine".
        clip_norm: Largest gradient norm; None: no clipping.
        validation_batch: Rows that are validated at a time.

    Raises:
        TaskError: If an argument has the wrong type or value.
    """

    model: nn.Module
    optimizer: Optimizer
    objective: Objective | Coupled
    training: Any
    validation: Any
    metric: str | None = None
    collate: Callable[[list[Any]], Any] | None = None
    batch_size: int = 64
    batch_schedule: Mapping[int, int] | Literal["noise"] | None = None
    micro_batch: int = 16
    split: Split | None = None
    lengths: Sequence[int] | Callable[[Any], Sequence[int]] | None = None
    batch_norm: BatchNorm | None = None
    epochs: int = 10
    base_batch: int | None = None
    lr_rule: LRRule = "none"
    warmup: int = 0
    decay: Decay = "none"
    clip_norm: float | None = None
    validation_batch: int = 256

    @property
    def whole_objective(self) -> Objective:
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

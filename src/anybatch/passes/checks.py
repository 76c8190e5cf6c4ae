"""What is refused before the first batch."""

from contextlib import AbstractContextManager

import torch
from torch import nn

from anybatch.errors import LossError, ParallelError, UpdateError
from anybatch.objectives import Coupled, Objective
from anybatch.passes.work import Autocast


def check_model(model: nn.Module) -> None:
    """Refuse what is no module."""
    if not isinstance(model, nn.Module):
        raise UpdateError(f"model={model!r:.80} is a {type(model).__name__}; expected a torch.nn.Module.")


def check_parts(model: nn.Module, objective: Objective | Coupled, autocast: Autocast) -> None:
    check_model(model)
    if not isinstance(objective, Objective | Coupled):
        raise LossError(
            f"objective={objective!r} is a {type(objective).__name__}; expected an Objective. Use "
            "supervised(criterion), huggingface(), Objective(loss, units) or Coupled(encode, loss)."
        )
    if autocast is not None and not isinstance(autocast, torch.dtype | AbstractContextManager):
        raise UpdateError(
            f"autocast={autocast!r}: expected a dtype, such as torch.bfloat16, a torch.autocast(...) of your own, or None."
        )


def check_sharded(drops: bool) -> None:
    if drops:
        raise ParallelError(
            "a model sharded by fully_shard cannot leave single micro-batches out: no rank has one's gradient alone. Use "
            "on_nonfinite='skip', which leaves the update out, or DistributedDataParallel."
        )

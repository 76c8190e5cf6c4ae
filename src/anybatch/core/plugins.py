"""Loaders of the packages above the core, each imported when a model or an option needs it.

No other module of the core may import them.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from anybatch.core.batch import Batch
from anybatch.core.hooks import PassHook
from anybatch.core.options import BatchNorm, Offload
from anybatch.core.splits import MicroBatches, Split

if TYPE_CHECKING:
    from anybatch.batch_norm import NormPolicy
    from anybatch.core.parallelism import Parallelism, Ranks
    from anybatch.dropout import Masks
    from anybatch.noise import NoiseHistory


def parallelism_of(model: nn.Module, *, reshard: bool) -> "Parallelism":
    """Return the strategy that reduces the gradients of `model` over its ranks."""
    from anybatch.parallel import parallelism_for

    return parallelism_for(model, reshard=reshard)


def group_of(model: nn.Module) -> Any:
    """Return the process group of the ranks that `model` is spread over; None for one process."""
    from anybatch.parallel import wrapping_of

    return wrapping_of(model).group


def norm_policy(model: nn.Module, mode: BatchNorm | None, before: "NormPolicy | None" = None) -> "NormPolicy | None":
    """Return the policy for BatchNorm, InstanceNorm and spectral norm; None for a model without them.

    `before` is the model's policy before layers were added or removed.
    """
    from anybatch.batch_norm import NormPolicy

    policy = NormPolicy(model, mode, is_told=before is not None and before.is_told)
    return policy if policy.is_needed else None


def lockstep_schedule(objective: Any, layers: Any, averaging: Any, offload: Offload, file: Any) -> Any:
    """Return the schedule of `batch_norm="exact"`."""
    from anybatch.batch_norm import in_lockstep

    return in_lockstep(objective, layers, averaging, offload, file)


def masks_in(model: nn.Module) -> "Masks | None":
    """Return the masks that the layers swapped by `row_dropout` share; None if there are no such layers."""
    from anybatch.dropout import masks_of

    return masks_of(model)


def row_numbers(masks: "Masks", model: nn.Module, cut: MicroBatches, batch: Batch, ranks: "Ranks") -> PassHook:
    """Return the hook that gives row-keyed dropout the row numbers of each micro-batch."""
    from anybatch.dropout import number_rows

    return number_rows(masks, model, cut, batch, ranks)


def noise_history(every: int | None, parameters: Callable[[], Sequence[nn.Parameter]]) -> "NoiseHistory | None":
    """Return the record of gradient noise, measured in one update of `every`; None if `every` is None."""
    if every is None:
        return None
    from anybatch.noise import NoiseHistory

    return NoiseHistory(every, parameters)


def auto_split() -> Split:
    """Return the split of `micro_batch="auto"`."""
    from anybatch.memory import fastest_fit

    return fastest_fit()


def check_first_batch(accumulator: Any, batch: Batch) -> Any:
    """Check that the losses of a few rows add up, before the first update of a batch that is cut."""
    from anybatch.verification import check_first_batch

    return check_first_batch(accumulator, batch)

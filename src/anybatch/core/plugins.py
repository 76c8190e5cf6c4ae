"""Parts outside the core that take part in an update: each is loaded when a model or an option needs it.

This is the only module of the core that knows the packages above it.
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
    """Return how the gradients of `model` are synchronised over its ranks."""
    from anybatch.parallel import parallelism_for

    return parallelism_for(model, reshard=reshard)


def group_of(model: nn.Module) -> Any:
    """Return the process group of the ranks that `model` is spread over; None for one process."""
    from anybatch.parallel import wrapping_of

    return wrapping_of(model).group


def norm_policy(model: nn.Module, mode: BatchNorm | None, before: "NormPolicy | None" = None) -> "NormPolicy | None":
    """Return how BatchNorm, InstanceNorm and spectral norm take part; None for a model that has none of them.

    `before` is that of the same model earlier, before a layer was put in or taken out.
    """
    from anybatch.batch_norm import NormPolicy

    policy = NormPolicy(model, mode, is_told=before is not None and before.is_told)
    return policy if policy.is_needed else None


def lockstep_schedule(objective: Any, layers: Any, averaging: Any, offload: Offload, file: Any) -> Any:
    """Return the schedule of `batch_norm="exact"`."""
    from anybatch.batch_norm import in_lockstep

    return in_lockstep(objective, layers, averaging, offload, file)


def masks_in(model: nn.Module) -> "Masks | None":
    """Return the masks that the layers swapped by `row_dropout` share; None where there are none."""
    from anybatch.dropout import masks_of

    return masks_of(model)


def row_numbers(masks: "Masks", model: nn.Module, cut: MicroBatches, batch: Batch, ranks: "Ranks") -> PassHook:
    """Return the hook that tells row-keyed dropout which rows of the batch a micro-batch holds."""
    from anybatch.dropout import number_rows

    return number_rows(masks, model, cut, batch, ranks)


def noise_history(every: int | None, parameters: Callable[[], Sequence[nn.Parameter]]) -> "NoiseHistory | None":
    """Return the record of the noise of gradients, measured in one update of `every`; None where nobody asked."""
    if every is None:
        return None
    from anybatch.noise import NoiseHistory

    return NoiseHistory(every, parameters)


def auto_split() -> Split:
    """Return the split that `micro_batch="auto"` stands for."""
    from anybatch.memory import fastest_fit

    return fastest_fit()


def check_first_batch(accumulator: Any, batch: Batch) -> Any:
    """Check that the losses of a few rows add up, before anything is learnt from the first batch that is cut."""
    from anybatch.verification import check_first_batch

    return check_first_batch(accumulator, batch)

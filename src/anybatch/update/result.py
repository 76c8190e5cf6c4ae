"""What one update did."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from anybatch.noise import NoiseScale


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    """What one update did. Tensors are detached; reading one waits for the device, nothing else does."""

    loss: Tensor
    """The loss of the whole batch."""
    grad_norm: Tensor
    """The norm of the whole batch's gradient, unscaled, before clipping."""
    units: float
    """What the mean loss divided by: rows, target tokens, summed class weights."""
    micro_batches: int
    """How many micro-batches the batch was cut into."""
    applied: bool
    """False where the step was skipped: weights, optimizer and scheduler are as before, and the batch can be given again."""
    lr: float | Tensor
    """The learning rate of this update, of the first parameter group."""
    metrics: Mapping[str, Tensor]
    """The objective's metrics, for the whole batch."""
    dropped: tuple[int, ...] = ()
    """Numbers of the micro-batches that were not finite and left out (`on_nonfinite="drop"`)."""
    noise_scale: NoiseScale | None = None
    """How large a batch would have as much noise as signal, in rows, from the latest measured updates (`noise=`)."""
    noise_reason: str | None = None
    """Why there is no noise scale."""
    retries: int = 0
    """How often memory ran out: the batch was started again in smaller micro-batches, or the step was."""

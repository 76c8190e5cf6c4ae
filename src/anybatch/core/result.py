"""What one update did."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from anybatch.core.display import one_line
from anybatch.core.notebook_html import facts_table, html_block

if TYPE_CHECKING:
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
    noise_scale: "NoiseScale | None" = None
    """How large a batch would have as much noise as signal, in rows, from the latest measured updates (`noise=`)."""
    noise_reason: str | None = field(default=None, repr=False)
    """Why there is no noise scale."""
    retries: int = 0
    """How often memory ran out: the batch was started again in smaller micro-batches, or the step was."""

    __repr__ = one_line

    def scalars(self) -> dict[str, float]:
        """What a logger takes, as Python numbers; metrics of more than one number are left out. It waits for the device once.

        >>> import torch
        >>> told = {"loss": torch.tensor(2.0), "grad_norm": torch.tensor(1.0), "metrics": {"accuracy": torch.tensor(0.5)}}
        >>> UpdateResult(**told, units=8, micro_batches=2, applied=True, lr=0.25).scalars()
        {'loss': 2.0, 'grad_norm': 1.0, 'lr': 0.25, 'units': 8.0, 'micro_batches': 2.0, 'accuracy': 0.5}
        """
        numbers = {name: metric for name, metric in self.metrics.items() if metric.numel() == 1}
        own = {name: getattr(self, name) for name in ("loss", "grad_norm", "lr", "units", "micro_batches")}
        return {name: float(value) for name, value in (own | numbers).items()}

    def _repr_html_(self) -> str:
        is_applied = "One update" if self.applied else "One update, not applied: the weights are as before"
        return html_block(is_applied, facts_table(self.scalars()))


Finding = Literal["pending", "off", "passed", "not judged"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstLook:
    """Result of the check of the first batch: `update.guard`. A loss that does not add up is an error, and is not told here."""

    finding: Finding
    """`"pending"` until a batch is cut, `"passed"`, `"not judged"`, or `"off"`."""
    error: float | None = None
    """How far the losses of the parts were from that of the whole, as a part of it."""
    reason: str = ""
    """Why it could not be judged; of one that passed, what its forwards changed outside of the model."""


PENDING = FirstLook(finding="pending")

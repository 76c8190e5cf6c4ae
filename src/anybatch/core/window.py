"""The window: any number of backward passes, one exact mean at the close."""

from collections.abc import Iterable
from types import TracebackType

import torch
from torch import Tensor, nn

from anybatch.core.autograd_graph import leaves_of
from anybatch.core.gradients import GradientSum
from anybatch.core.metrics import Number, by_itself
from anybatch.core.shares import weighted_sum
from anybatch.core.torch_private import is_sharded
from anybatch.errors import LossError, UnitsError, WindowError


class Window:
    """Backward passes whose number and weights need not be known ahead; `.grad` is their unit-weighted mean at the close.

        grad += sum_k units_k * d loss_k / sum_k units_k

    The first pass's units serve as a provisional denominator, and the gradients are rescaled once at the close. `.grad` is
    added to, as `backward()` adds to it. An exception that leaves the block leaves the gradients as they were before it.
    Only `parameters` are rescaled, so a loss whose gradient reaches any other leaf (a head that was not listed, a criterion's
    parameters, inputs that require a gradient) is refused before its backward pass. With `drop_nonfinite`, a pass whose loss
    or gradient is inf or nan adds nothing and counts for nothing; this needs a second set of gradients and waits for the device
    after each pass.

    >>> weight = nn.Parameter(torch.zeros(1))
    >>> with Window([weight]) as window:
    ...     window.backward((weight * 3).mean(), units=1)
    ...     window.backward((weight * 6).mean(), units=2)
    True
    True
    >>> weight.grad, window.units
    (tensor([5.]), 3)
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], *, drop_nonfinite: bool = False, keep_fp32: bool = False
    ) -> None:
        if isinstance(parameters, nn.Module):
            raise WindowError(f"Window({type(parameters).__name__}): expected parameters; give model.parameters().")
        self._sum = GradientSum(parameters, keep_fp32=keep_fp32, isolate=drop_nonfinite)
        self._listed = set(self._sum.parameters)
        self._is_sharded = any(is_sharded(parameter) for parameter in self._listed)
        self._provisional: float = 0
        self._losses: list[Tensor] = []
        self._units: list[float] = []
        self._is_open = False
        self.dropped = 0
        """Passes that were not finite and left out."""

    @property
    def units(self) -> float:
        """The units of all passes that count, so far."""
        return sum(self._units)

    @property
    def micro_batches(self) -> int:
        """The passes that count, so far."""
        return len(self._losses)

    @property
    def loss(self) -> Tensor:
        """The unit-weighted mean of the losses, so far; 0 where nothing counts."""
        return weighted_sum(self._losses, [units / (self.units or 1) for units in self._units])

    def __enter__(self) -> "Window":
        if self._is_open or self._units:
            raise WindowError(
                "this window was entered before; a window serves one block: make a new Window(parameters)."
            )
        self._sum.__enter__()
        self._is_open = True
        return self

    def backward(self, mean_loss: Tensor, units: Number = 1) -> bool:
        """Add the gradient of a loss that is a mean over `units`; True if it counts.

        A pass of 0 units is left out without running: a mean over nothing has no gradient.
        """
        if not self._is_open:
            raise WindowError("this window is not open: call backward inside `with Window(parameters) as window:`.")
        number = units.item() if isinstance(units, Tensor) else units
        if not 0 <= number < float("inf"):
            raise UnitsError(f"units={number!r}: give what this mean loss divided by, a finite number, 0 or more.")
        if not isinstance(mean_loss, Tensor):
            raise LossError(
                f"the loss is a {type(mean_loss).__name__}: {mean_loss!r:.60}; expected a tensor with a graph."
            )
        if mean_loss.numel() != 1:
            raise LossError(f"the loss has shape {tuple(mean_loss.shape)}; expected one number: give its mean.")
        if number == 0:
            return False
        self._check_leaves(mean_loss)
        self._provisional = self._provisional or number
        loss = by_itself(mean_loss).reshape(())
        is_counted = not (self._sum.isolate and not bool(loss.isfinite()))
        if is_counted:
            is_counted = self._sum.backward(mean_loss, torch.full_like(mean_loss, number / self._provisional))
        if not is_counted:
            self.dropped += 1
            return False
        self._losses.append(loss)
        self._units.append(number)
        return True

    def _check_leaves(self, loss: Tensor) -> None:
        """Refuse a gradient that would not be rescaled at the close. Of sharded parameters other tensors are in the graph."""
        for leaf in () if self._is_sharded else leaves_of([loss]):
            if leaf not in self._listed:
                what = "a parameter" if isinstance(leaf, nn.Parameter) else "a tensor"
                raise WindowError(
                    f"the gradient of this loss reaches {what} of shape {tuple(leaf.shape)} that is not among the "
                    f"{len(self._listed)} parameters of this window, and would not become their mean. List all that get a "
                    "gradient: Window([*model.parameters(), *head.parameters()]); or detach it, or requires_grad_(False)."
                )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_open = False
        if self._units:
            self._sum.scale = self._provisional / self.units
        self._sum.__exit__(kind, error, traceback)

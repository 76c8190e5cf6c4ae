"""Sums of gradients over several backward passes (`GradientSum`, `Window`), their norm and clipping."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn.utils import get_total_norm

from anybatch.core.batch import tensor_on
from anybatch.core.metrics import Number, by_itself
from anybatch.core.options import Reduction
from anybatch.core.torch_private import (
    STEPPED_IN_BACKWARD,
    at_least_fp32,
    engine_run_backward,
    foreach_clamp_max_,
    foreach_clamp_min_,
    foreach_mul_,
    foreach_norm,
    gradient_hooks_of,
    is_low,
    is_sharded,
    leaves_of,
    number_in,
    own_part,
)
from anybatch.errors import LossError, UnitsError, UpdateError, WindowError


class GradientSum:
    """Block in which `.grad` of `parameters` holds only the sum of the backward passes inside.

    At the end, `.grad = before + scale * sum`. An exception inside restores `.grad`, the same tensors. Gradients of bf16 and
    fp16 parameters are summed in fp32 (torch's `grad_dtype`), because 256 sums in bf16 lose two digits; the result has the
    parameter's dtype, or fp32 with `keep_fp32`. Without `in_fp32` they are summed as they are, in half the memory.

    With `isolate`, each backward pass is checked before it is added, which needs a second set of gradients: `backward`
    returns False for a non-finite one and adds nothing. With `copies`, the earlier `.grad` is copied, because it is a view of
    DDP's buckets, which the reduction overwrites.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        keep_fp32: bool = False,
        isolate: bool = False,
        copies: bool = False,
        in_fp32: bool = True,
    ) -> None:
        self.parameters = tuple(parameter for parameter in dict.fromkeys(parameters) if parameter.requires_grad)
        self.scale = 1.0
        self.keep_fp32 = keep_fp32
        self.isolate = isolate
        self.copies = copies
        self.in_fp32 = in_fp32
        self._before: list[Tensor | None] = []
        self._grad_dtypes: dict[nn.Parameter, torch.dtype | None] = {}
        self._is_torn = False

    def __enter__(self) -> "GradientSum":
        self._before = _set_aside(self.parameters)
        if self.copies:
            self._before = [None if grad is None else grad.clone() for grad in self._before]
        for parameter in self.parameters:
            # FSDP makes a sharded parameter's gradient, and sums in its own reduce_dtype
            if self.in_fp32 and is_low(parameter) and not is_sharded(parameter):
                self._grad_dtypes[parameter] = parameter.grad_dtype
                parameter.grad_dtype = torch.float32
        return self

    def backward(self, loss: Tensor | Sequence[Tensor], share: Tensor | Sequence[Tensor]) -> bool:
        """Add `share * d loss`, summed over several losses; return False if it was isolated and not finite."""
        self._is_torn = True
        if not self.isolate:
            _backward(loss, share)
            self._is_torn = False
            return True
        so_far = _set_aside(self.parameters)
        is_finite = False
        try:
            _backward(loss, share)
            alone = [parameter.grad for parameter in self.parameters]
            is_finite = all_finite(alone)
            if is_finite:
                _add_each(so_far, alone)
        finally:
            for parameter, grad in zip(self.parameters, so_far, strict=True):
                parameter.grad = grad
            self._is_torn = False
        return is_finite

    def zero(self) -> None:
        """Set the sum to zero for every parameter with a gradient, nan included."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad = torch.zeros_like(parameter.grad)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None or self._is_torn:
            self._restore()
            if kind is None:
                raise WindowError(
                    "a backward pass in this window died half-way and its error was caught inside the block; the "
                    "gradients were put back to what they were before the window. Let the error leave the block, and "
                    "start the batch again."
                )
            return
        try:
            self._close()
        except BaseException:
            self._restore()
            raise

    def _close(self) -> None:
        if self.scale == 1.0 and not self._grad_dtypes and all(before is None for before in self._before):
            return
        sums = [parameter.grad for parameter in self.parameters]
        if self.scale != 1.0:
            dense = [total for total in sums if total is not None and not total.is_sparse]
            if dense:
                foreach_mul_(dense, self.scale)
            for total in sums:
                if total is not None and total.is_sparse:
                    total.mul_(self.scale)
        every = zip(self.parameters, self._before, sums, strict=True)
        # allocate everything first: if memory runs out, no earlier gradient has been changed
        joined = [(parameter, self._add(parameter, before, total)) for parameter, before, total in every]
        for parameter, give in joined:
            if parameter in self._grad_dtypes and self.keep_fp32:
                # grad_dtype None allows any dtype: fp32 now, the parameter's own in the next backward()
                parameter.grad = None
                parameter.grad_dtype = None
                parameter.grad = give()
            else:
                self._give_back(parameter, give())

    def _add(self, parameter: nn.Parameter, before: Tensor | None, total: Tensor | None) -> Callable[[], Tensor | None]:
        """Return a function that gives `before + total` without allocating. May add into `total` now, never into `before`."""
        is_low = parameter in self._grad_dtypes
        if total is None:
            return lambda: before
        if before is None:
            dtype = total.dtype if self.keep_fp32 or not is_low else self._grad_dtypes[parameter] or parameter.dtype
            cast = total.to(dtype)
            return lambda: cast
        if (
            (is_low and self.keep_fp32)
            or (not is_low and before.dtype != total.dtype)
            or before.is_sparse > total.is_sparse
        ):
            total.add_(before)
            return lambda: total
        if before.dtype == total.dtype and not before.is_sparse:
            return lambda: before.add_(total)
        both = before + total
        return lambda: both if both.is_sparse else before.copy_(both)

    @contextmanager
    def undone(self) -> Iterator["GradientSum"]:
        """Enter a block after which `.grad` is restored, whatever happens inside."""
        self.__enter__()
        try:
            yield self
        finally:
            self._restore()

    def _restore(self) -> None:
        for parameter, before in zip(self.parameters, self._before, strict=True):
            self._give_back(parameter, before)

    def _give_back(self, parameter: nn.Parameter, grad: Tensor | None) -> None:
        """Set `.grad`, with the `grad_dtype` that the parameter had before."""
        if parameter in self._grad_dtypes:
            parameter.grad = None
            parameter.grad_dtype = self._grad_dtypes[parameter]
        parameter.grad = grad


def _backward(loss: Tensor | Sequence[Tensor], share: Tensor | Sequence[Tensor]) -> None:
    if isinstance(loss, Tensor) and isinstance(share, Tensor) and loss.dim() == 0:
        engine_run_backward((loss,), (share,), False, False, (), allow_unreachable=True, accumulate_grad=True)
    else:
        torch.autograd.backward(loss, share)


def all_finite(grads: Iterable[Tensor | None]) -> bool:
    """Return True if no gradient holds inf or nan. Reads this rank's part of sharded ones; waits for the device."""
    values = (grad.coalesce().values() if grad.is_sparse else own_part(grad) for grad in grads if grad is not None)
    return all(number_in(value.isfinite().all()) for value in values)


def _set_aside(parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
    grads = [parameter.grad for parameter in parameters]
    for parameter, grad in zip(parameters, grads, strict=True):
        if grad is not None:
            parameter.grad = None
    return grads


def _add_each(sums: list[Tensor | None], terms: Sequence[Tensor | None]) -> None:
    """Add each term to its sum in place, or the sum to the term if only the sum is sparse."""
    for index, (so_far, term) in enumerate(zip(sums, terms, strict=True)):
        if so_far is None:
            sums[index] = term
        elif term is not None:
            sums[index] = term.add_(so_far) if so_far.is_sparse and not term.is_sparse else so_far.add_(term)


def shares_of(units: Sequence[float], reduction: Reduction) -> list[float]:
    """Return the weight of each mean in the mean over all units; sums weigh 1 each.

    >>> shares_of([6, 2], "mean"), shares_of([6, 2], "sum")
    ([0.75, 0.25], [1.0, 1.0])
    """
    if reduction == "sum":
        return [1.0] * len(units)
    total = sum(units) or 1.0
    return [one / total for one in units]


def weighted_sum(losses: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Compute sum_k weight_k * loss_k, in fp32 or better; 0 for no losses."""
    if not losses:
        return torch.zeros(())
    stacked = at_least_fp32(torch.stack(tuple(losses)))
    return stacked.dot(tensor_on(weights, stacked.device, stacked.dtype))


class Window:
    """Backward passes in a loop of your own, with `.grad` their unit-weighted mean at the end of the block.

        grad += sum_k units_k * d loss_k / sum_k units_k

    The number of passes and their units need not be known in advance: gradients are rescaled once, at the end. `.grad` is
    added to, as `backward()` adds to it. An exception that leaves the block restores the gradients.

    Args:
        parameters: All parameters that get a gradient. A loss that reaches another leaf (a head that is not listed, a
            criterion's parameters, inputs that require a gradient) is refused, because it would not be rescaled.
        drop_nonfinite: Leave out a pass with an inf or nan in its loss or gradient. Needs a second set of gradients, and
            waits for the device after each pass.
        keep_fp32: Leave gradients of bf16 and fp16 parameters in fp32, for an optimizer that takes them so.

    Raises:
        WindowError: If `parameters` is a module, or a window is entered twice.

    Example:
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
        """Number of passes that were left out because they were not finite."""

    @property
    def units(self) -> float:
        """Units of all passes that count, so far."""
        return sum(self._units)

    @property
    def micro_batches(self) -> int:
        """Number of passes that count, so far."""
        return len(self._losses)

    @property
    def loss(self) -> Tensor:
        """Unit-weighted mean of the losses so far; 0 without any."""
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
        """Add the gradient of a mean loss.

        Args:
            mean_loss: A tensor with one number, with its graph.
            units: The number that the mean divides by. A pass of 0 units does not run.

        Returns:
            True if the pass counts; False if it has 0 units or was dropped.

        Raises:
            WindowError: Outside of the block, or if the loss reaches a parameter that is not listed.
            UnitsError: If `units` is negative or not finite.
            LossError: If `mean_loss` is not a tensor with one number.
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
        """Refuse a loss that reaches other leaves. Not checked for sharded parameters, which are no leaves."""
        for leaf in () if self._is_sharded else leaves_of([loss]):
            if leaf not in self._listed:
                what = "a parameter" if isinstance(leaf, nn.Parameter) else "a tensor"
                raise WindowError(
                    f"the gradient of this loss reaches {what} of shape {tuple(leaf.shape)} that is not among the "
                    f"{len(self._listed)} parameters of this window, and would not become their mean. List all that get a "
                    "gradient: Window([*model.parameters(), *head.parameters()]); or detach it, or requires_grad_(False)."
                )

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._is_open = False
        if self._units:
            self._sum.scale = self._provisional / self.units
        self._sum.__exit__(kind)


def takes_fp32_gradients(optimizer: optim.Optimizer) -> bool:
    """Return True for optimizers that take fp32 gradients of bf16 and fp16 parameters; others need them cast.

    Adam, AdamW, NAdam, RAdam, Adamax, all fused kernels and centered RMSprop refuse them (torch 2.13).
    """
    promoting = (
        optim.SGD,
        optim.Adagrad,
        optim.RMSprop,
        optim.Adafactor,
        optim.Adadelta,
        optim.Rprop,
        optim.ASGD,
        optim.Muon,
    )
    is_refused = any(group.get(option) for group in optimizer.param_groups for option in ("fused", "centered"))
    return type(optimizer) in promoting and not is_refused


def cast_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Cast fp32 gradients of bf16 and fp16 parameters to the parameter's dtype, rounding once."""
    for parameter in parameters:
        grad = parameter.grad
        if grad is not None and grad.dtype != parameter.dtype and is_low(parameter):
            cast = grad.to(parameter.dtype)  # may run out of memory, so it comes first
            parameter.grad = None
            parameter.grad_dtype = parameter.dtype
            parameter.grad = cast


def gradient_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Compute the Euclidean norm of all gradients, on the device; for sharded ones, over all ranks. 0 without gradients."""
    values = _gradient_values(parameters)
    sharded = [value for value in values if is_sharded(value)]
    if sharded:
        parts = [get_total_norm(sharded).full_tensor()]  # type: ignore[attr-defined]
        parts += [get_total_norm([value]) for value in values if not is_sharded(value)]
        whole: Tensor = torch.linalg.vector_norm(torch.stack(parts))
        return whole
    if len({(value.device, value.dtype) for value in values}) != 1:
        return get_total_norm(values)
    # get_total_norm without its grouping by device and dtype: half the time on a tiny model
    norm: Tensor = torch.linalg.vector_norm(torch.stack(foreach_norm(values)))
    return norm


def clip_to_norm(parameters: Sequence[nn.Parameter], max_norm: float, norm: Tensor) -> None:
    """Scale all gradients by `min(1, max_norm / (norm + 1e-6))`, as `clip_grad_norm_` does."""
    values = [own_part(value) for value in _gradient_values(parameters)]
    if values:
        coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        foreach_mul_(values, coefficient.to(values[0].device))


def clip_to_value(parameters: Sequence[nn.Parameter], max_value: float) -> None:
    """Clamp every element of every gradient to [-max_value, max_value], as `clip_grad_value_` does."""
    values = [own_part(value) for value in _gradient_values(parameters)]
    if values:
        foreach_clamp_min_(values, -max_value)
        foreach_clamp_max_(values, max_value)


def _gradient_values(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """List the values of every gradient; sparse ones are coalesced in place first, so that their values share memory."""
    values = []
    for parameter in parameters:
        grad = parameter.grad
        if grad is not None and grad.is_sparse:
            grad = parameter.grad = grad.coalesce()
            grad = grad.values()
        if grad is not None:
            values.append(grad)
    return values


_OWN_HOOKS = ("torch.nn.parallel.", "torch.distributed.fsdp.", "torch.distributed._composable.", "anybatch.")
"""Modules with hooks that may run once per micro-batch: DDP, FSDP and our own meters."""


def check_hooks(
    parameters: Iterable[nn.Parameter], names: Callable[[], Iterable[tuple[str, nn.Parameter]]], num_passes: int
) -> None:
    """Refuse parameters with a user's hook that `num_passes` backward passes would call.

    FSDP2 calls hooks of sharded parameters once, with the whole gradient.
    """
    if num_passes < 2:
        return
    for parameter in parameters:
        before, after = gradient_hooks_of(parameter)
        stepping = parameter.__dict__.get(STEPPED_IN_BACKWARD, ())
        if not (before or after or stepping) or is_sharded(parameter):
            continue
        hooks = [("register_hook", hook) for hook in (before or {}).values()]
        hooks += [("register_post_accumulate_grad_hook", hook) for hook in (after or {}).values()]
        hooks = [(how, hook) for how, hook in hooks if not _module_of(hook).startswith(_OWN_HOOKS)]
        for how, hook in hooks + [("an optimizer in backward", optimizer) for optimizer in stepping]:
            name = next(
                (repr(name) for name, other in names() if other is parameter), f"shape {tuple(parameter.shape)}"
            )
            inside = getattr(hook, "func", hook)
            what = getattr(inside, "__qualname__", type(inside).__name__)
            raise UpdateError(
                f"parameter {name} has a hook ({how}: {what}), which backward would call {num_passes} times for this batch, "
                "each time with one micro-batch's part of the gradient instead of once with all of it. Remove it "
                "(handle.remove()) and do the same to .grad when all of it is there: accumulator.backward(batch), then your "
                "function, then optimizer.step(). Update clips by itself (clip_norm=, clip_value=) and steps the optimizer "
                "once, after the last micro-batch; an optimizer that steps in backward cannot accumulate."
            )


def _module_of(hook: Any) -> str:
    """Return the name of the module that defines a hook, a bound method, or the function of a partial."""
    inside = getattr(hook, "func", hook)
    return f"{getattr(inside, '__module__', None) or type(inside).__module__}."

"""Summing the gradients of several backward passes, apart from what `.grad` held before, in enough precision."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

import torch
from torch import Tensor, nn

from anybatch.core.low_precision import is_low, number_in
from anybatch.core.torch_private import is_sharded, multiply_each_, own_part, run_engine
from anybatch.errors import WindowError


class GradientSum:
    """A block in which `.grad` of `parameters` holds only what the backward passes inside added.

    At the close, `.grad = before + scale * sum`. An exception inside leaves `.grad` as it was before, the same tensors.
    bf16 and fp16 parameters are summed in fp32 (torch's `grad_dtype`), because 256 sums in bf16 lose two digits; the sum
    is handed over in the parameter's dtype, or stays fp32 where `keep_fp32` says that the optimizer takes it. Without
    `in_fp32` they are summed as they are, which takes half the memory.

    With `isolate`, each backward pass stands alone until it is known to be finite, at the price of a second set of
    gradients: `backward` returns False for one that was not, and adds nothing of it. With `copies`, what `.grad` held is
    copied: where it is a view of DDP's buckets, synchronising would write over it.
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
            # a sharded parameter's gradient comes from FSDP, which sums in its own reduce_dtype
            if self.in_fp32 and is_low(parameter) and not is_sharded(parameter):
                self._grad_dtypes[parameter] = parameter.grad_dtype
                parameter.grad_dtype = torch.float32
        return self

    def backward(self, loss: Tensor | Sequence[Tensor], share: Tensor | Sequence[Tensor]) -> bool:
        """Add `share * d loss`, summed where there are several; True unless it was isolated and not finite."""
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
        """Make the sum zero for every parameter that a backward pass has touched, whatever it holds, nan included."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad = torch.zeros_like(parameter.grad)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
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
            _scale_each([total for total in sums if total is not None], self.scale)
        every = zip(self.parameters, self._before, sums, strict=True)
        # all that takes memory comes first: where it runs out, nothing that was there before has been added to
        joined = [(parameter, self._joined(parameter, before, total)) for parameter, before, total in every]
        for parameter, give in joined:
            if parameter in self._grad_dtypes and self.keep_fp32:
                # None takes a gradient of any dtype: fp32 now, the parameter's own in the user's next backward()
                parameter.grad = None
                parameter.grad_dtype = None
                parameter.grad = give()
            else:
                self._give_back(parameter, give())

    def _joined(
        self, parameter: nn.Parameter, before: Tensor | None, total: Tensor | None
    ) -> Callable[[], Tensor | None]:
        """What gives `before + total` without taking memory; what it needs is taken here, and `before` is not touched."""
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
        """The block for looking only: `.grad` is put back at its end, whatever happens inside."""
        self.__enter__()
        try:
            yield self
        finally:
            self._restore()

    def _restore(self) -> None:
        for parameter, before in zip(self.parameters, self._before, strict=True):
            self._give_back(parameter, before)

    def _give_back(self, parameter: nn.Parameter, grad: Tensor | None) -> None:
        """Set `.grad`, under the gradient dtype that the parameter had before."""
        if parameter in self._grad_dtypes:
            parameter.grad = None
            parameter.grad_dtype = self._grad_dtypes[parameter]
        parameter.grad = grad


def _backward(loss: Tensor | Sequence[Tensor], share: Tensor | Sequence[Tensor]) -> None:
    if isinstance(loss, Tensor) and isinstance(share, Tensor) and loss.dim() == 0:
        run_engine((loss,), (share,), False, False, (), allow_unreachable=True, accumulate_grad=True)
    else:
        torch.autograd.backward(loss, share)


def _scale_each(grads: Sequence[Tensor], factor: float) -> None:
    dense = [grad for grad in grads if not grad.is_sparse]
    if dense:
        multiply_each_(dense, factor)
    for grad in grads:
        if grad.is_sparse:
            grad.mul_(factor)


def all_finite(grads: Iterable[Tensor | None]) -> bool:
    """True if no gradient holds inf or nan; of a sharded one, what this rank has of it. Waits for the device."""
    return all(number_in(_values(grad).isfinite().all()) for grad in grads if grad is not None)


def _values(grad: Tensor) -> Tensor:
    return grad.coalesce().values() if grad.is_sparse else own_part(grad)


def _set_aside(parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
    grads = [parameter.grad for parameter in parameters]
    for parameter, grad in zip(parameters, grads, strict=True):
        if grad is not None:
            parameter.grad = None
    return grads


def _added(one: Tensor, other: Tensor) -> Tensor:
    """`one + other`, in place of `one` unless only that one is sparse."""
    return other.add_(one) if one.is_sparse and not other.is_sparse else one.add_(other)


def _add_each(sums: list[Tensor | None], terms: Sequence[Tensor | None]) -> None:
    for index, term in enumerate(terms):
        so_far = sums[index]
        if so_far is None or term is None:
            sums[index] = term if so_far is None else so_far
        else:
            sums[index] = _added(so_far, term)

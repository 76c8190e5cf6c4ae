"""Summing the gradients of several backward passes, apart from what `.grad` held before, in enough precision."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

import torch
from torch import Tensor, nn

from anybatch.errors import WindowError

LOW_PRECISION = (torch.bfloat16, torch.float16)


class GradientSum:
    """A block in which `.grad` of `parameters` holds only what the backward passes inside added.

    At the close, `.grad = before + scale * sum`. An exception inside leaves `.grad` as it was before, the same tensors.
    bf16 and fp16 parameters are summed in fp32 (torch's `grad_dtype`), because 256 sums in bf16 lose two digits; the sum
    is handed over in the parameter's dtype, or stays fp32 where `keep_fp32` says that the optimizer takes it.

    With `isolate`, each backward pass stands alone until it is known to be finite, at the price of a second set of
    gradients: `backward` returns False for one that was not, and adds nothing of it.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], *, keep_fp32: bool = False, isolate: bool = False) -> None:
        self.parameters = [parameter for parameter in dict.fromkeys(parameters) if parameter.requires_grad]
        self.scale = 1.0
        self.keep_fp32 = keep_fp32
        self.isolate = isolate
        self._before: list[Tensor | None] = []
        self._grad_dtypes: list[tuple[nn.Parameter, torch.dtype | None]] = []
        self._is_torn = False

    def __enter__(self) -> "GradientSum":
        self._before = _set_aside(self.parameters)
        for parameter in self.parameters:
            if parameter.dtype in LOW_PRECISION:
                self._grad_dtypes.append((parameter, parameter.grad_dtype))
                parameter.grad_dtype = torch.float32
        return self

    def backward(self, loss: Tensor, share: Tensor) -> bool:
        """Add `share * d loss`; True unless it was isolated and not finite."""
        self._is_torn = True
        if not self.isolate:
            # the share goes in as the gradient of the loss: no multiplication in the graph, 15 % of a tiny step
            loss.backward(gradient=share)
            self._is_torn = False
            return True
        so_far = _set_aside(self.parameters)
        is_finite = False
        try:
            loss.backward(gradient=share)
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
        self._close()

    def _close(self) -> None:
        if self.scale == 1.0 and not self._grad_dtypes and all(before is None for before in self._before):
            return
        grads = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if self.scale != 1.0:
            scale_each(grads, self.scale)
        kept = {parameter for parameter, _ in self._grad_dtypes} if self.keep_fp32 else set()
        sums = [parameter.grad for parameter in self.parameters]
        if self._grad_dtypes:
            self._reset_grad_dtypes(kept)
        for parameter, before, total in zip(self.parameters, self._before, sums, strict=True):
            if total is not None and total.is_sparse:
                total = total.coalesce()
            if total is not None and before is not None:
                parameter.grad = before.add_(total)
            elif total is None:
                parameter.grad = before
            elif total is not parameter.grad:
                parameter.grad = total if parameter in kept else total.to(parameter.dtype)

    @contextmanager
    def undone(self) -> Iterator["GradientSum"]:
        """The block for looking only: `.grad` is put back at its end, whatever happens inside."""
        self.__enter__()
        try:
            yield self
        finally:
            self._restore()

    def _restore(self) -> None:
        self._reset_grad_dtypes(set())
        for parameter, before in zip(self.parameters, self._before, strict=True):
            parameter.grad = before

    def _reset_grad_dtypes(self, kept: set[nn.Parameter]) -> None:
        """Give low-precision parameters their own gradient dtype back, but for those that keep fp32 ones."""
        for parameter, grad_dtype in self._grad_dtypes:
            parameter.grad = None
            if parameter not in kept:
                parameter.grad_dtype = grad_dtype


def scale_each(grads: Sequence[Tensor], factor: float) -> None:
    """Multiply every gradient in place, sparse ones too."""
    dense = [grad for grad in grads if not grad.is_sparse]
    if dense:
        torch._foreach_mul_(dense, factor)
    for grad in grads:
        if grad.is_sparse:
            grad.mul_(factor)


def all_finite(grads: Iterable[Tensor | None]) -> bool:
    """True if no gradient holds inf or nan. Waits for the device."""
    values = [dense_values(grad) for grad in grads if grad is not None]
    return all(bool(value.isfinite().all()) for value in values)


def dense_values(grad: Tensor) -> Tensor:
    """The numbers of a gradient: itself, or the values of a coalesced sparse one, sharing its memory."""
    return grad.coalesce().values() if grad.is_sparse else grad


def _set_aside(parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
    grads = [parameter.grad for parameter in parameters]
    for parameter, grad in zip(parameters, grads, strict=True):
        if grad is not None:
            parameter.grad = None
    return grads


def _add_each(sums: list[Tensor | None], terms: Sequence[Tensor | None]) -> None:
    for index, term in enumerate(terms):
        so_far = sums[index]
        if so_far is None or term is None:
            sums[index] = term if so_far is None else so_far
        else:
            sums[index] = so_far.add_(term)

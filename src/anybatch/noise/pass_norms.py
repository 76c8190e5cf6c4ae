"""The norm of each micro-batch's part of a gradient, seen by hooks on parameters while backward runs, and by nobody else."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from anybatch.core import MicroBatches, PassHook, is_in_arrival_order
from anybatch.errors import BatchError
from anybatch.noise.noise_scale import WindowNoise


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSums:
    """The micro-batches of one batch, of all ranks, as sums."""

    squares: float
    """sum_k |g_k|^2 of the parts that add up to the batch's gradient."""
    share_squares: float
    """sum_k (units_k / units)^2."""
    rows: float

    def window(self, norm: float) -> WindowNoise:
        """What the batch says of noise, where `norm` is that of its whole gradient."""
        return WindowNoise.of(norm, self.squares, self.share_squares, self.rows)


@dataclass(frozen=True, slots=True)
class NotMeasured:
    """A batch whose micro-batches were not measured."""

    reason: str = ""
    """Why, where it was their turn."""


class PassNorms(PassHook):
    """Norms of the passes of one batch, whose rows are cut in the order in which they came.

    Rows that a split sorted by length make strata: differences between micro-batches would count as noise of rows. Norms stay
    on the device until `numbers`, which waits for it; a gradient is looked at as it passes, and no copy is kept.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._seen: dict[int, Tensor] = {}
        self._passes: list[list[Tensor]] = []
        self._is_whole = True
        """False once a parameter's gradient came in parts, as reentrant checkpointing has it: the square of none is its own."""
        self.found: NormSums | NotMeasured = NotMeasured()

    @contextmanager
    def around_counted(self) -> Iterator[None]:
        self._seen, self._passes = {}, []
        hooks = [
            parameter.register_hook(partial(self._see, number))
            for number, parameter in enumerate(self._parameters)
            if parameter.requires_grad
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def after_pass(self, micro_batch: int, *, is_kept: bool, reports: bool) -> None:
        if is_kept:
            self._passes.append(list(self._seen.values()))
        self._seen = {}

    def numbers(self, cut: MicroBatches, units: Sequence[float]) -> list[float]:
        squares = math.fsum(_values([square for squares in self._passes for square in squares]))
        is_sound = self._is_whole and is_in_arrival_order(cut)
        try:
            rows = sum(len(numbers) for numbers in cut.row_numbers)
        except BatchError:  # micro-batches of the user's own making
            rows, is_sound = 0, False
        return [squares if is_sound else math.nan, sum(one * one for one in units), rows]

    def receive(self, totals: Sequence[float], units: float, factor: Callable[[], float]) -> None:
        self.found = self._found(totals, units, factor)

    def _found(self, totals: Sequence[float], units: float, factor: Callable[[], float]) -> NormSums | NotMeasured:
        squares, unit_squares, rows = totals
        squares *= factor() ** 2
        if not math.isfinite(squares):
            return NotMeasured(
                "the norms of single micro-batches were not to be had: a gradient is not finite, a split of your own moves "
                "rows, rows cannot be counted, or reentrant checkpointing makes a parameter's gradient in parts (use "
                "use_reentrant=False)"
            )
        if not units:
            return NotMeasured("the batch has no units")
        shares = unit_squares / (units * units)
        if shares > 1.0 - 1e-12:
            return NotMeasured(ONE_MICRO_BATCH)
        return NormSums(squares=squares, share_squares=shares, rows=rows)

    def _see(self, number: int, grad: Tensor) -> None:
        self._is_whole = self._is_whole and number not in self._seen
        values = grad.coalesce().values() if grad.is_sparse else grad
        self._seen[number] = _square(values)


def _square(values: Tensor) -> Tensor:
    """The sum of squares, in fp32 at least."""
    if values.dtype in (torch.float32, torch.float64):
        flat = values.reshape(-1)
        return torch.dot(flat, flat)
    norm: Tensor = torch.linalg.vector_norm(values, dtype=torch.promote_types(values.dtype, torch.float32))
    return norm.square()


ONE_MICRO_BATCH = (
    "one micro-batch holds all that counts of a batch, and its gradient alone says nothing of noise: use a smaller "
    "micro_batch"
)


def _values(squares: Sequence[Tensor]) -> list[float]:
    if len({(square.device, square.dtype) for square in squares}) == 1:
        values: list[float] = torch.stack(tuple(squares)).tolist()  # one wait for the device
        return values
    return [square.item() for square in squares]

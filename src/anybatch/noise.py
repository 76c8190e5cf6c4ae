"""`noise_scale`: the gradient noise of measured updates, from the norms of their micro-batches."""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from anybatch.core import MicroBatches, PassHook, is_in_arrival_order
from anybatch.errors import BatchError

FEWEST_WINDOWS = 5
"""The interval of four would be twice as wide as that of eight."""
NORMAL_QUANTILE = 1.6448536269514722
"""0.95 quantile of the normal distribution: the interval leaves out 5 % on either side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseScale:
    """rows * |noise|^2 / |signal|^2 of a batch's gradient, whatever the batch: a property of the data and the weights."""

    rows: float
    """inf where no signal was seen at all."""
    low: float
    high: float
    """The 90 % interval of sampling, by Fieller's theorem; inf where the signal is not told from 0."""
    windows: int
    """How many measured updates it is from."""


@dataclass(frozen=True, slots=True)
class WindowNoise:
    """Estimates of one batch, without bias: both are means over the draw of its rows."""

    row_noise: float
    """|noise|^2 of the gradient of a single row."""
    signal: float
    """|gradient of all rows there are|^2; of one batch it may be below 0."""

    @staticmethod
    def of(norm: float, squares: float, share_squares: float, rows: float) -> "WindowNoise":
        """Estimate from |g| of the batch, sum_k |g_k|^2 of the parts that add up to g, and sum_k (units_k / units)^2.

            signal = (|S|^2 - sum_k |S_k|^2) / (U^2 - sum_k U_k^2),  noise = (sum_k |S_k|^2 - signal * sum_k U_k^2) / U^2

        with S_k = U * g_k: the products of different micro-batches, whose rows were drawn apart, hold no noise. Without bias
        for any cut that does not look at what rows hold, micro-batches of any sizes, and any units.
        """
        signal = (norm * norm - squares) / (1.0 - share_squares)
        return WindowNoise(rows * (squares - signal * share_squares), signal)


def noise_scale_of(windows: Sequence[WindowNoise]) -> NoiseScale:
    """Divide means over `windows`, two or more: a mean of their ratios would be biased, and may divide by nearly 0."""
    noise, signal = [one.row_noise for one in windows], [one.signal for one in windows]
    ratio = _mean(noise) / _mean(signal) if _mean(signal) > 0 else math.inf
    low, high = fieller(noise, signal)
    return NoiseScale(rows=max(ratio, 0.0), low=low, high=high, windows=len(windows))


def fieller(above: Sequence[float], below: Sequence[float]) -> tuple[float, float]:
    """The 90 % interval of mean(above) / mean(below), both of the same draws, for a ratio that is not negative.

    All r for which mean(above - r * below) is not told from 0: those between the roots of a quadratic; above the upper root,
    where mean(below) itself is not told from 0.

    >>> low, high = fieller([9.0, 11.0, 10.0, 12.0], [2.0, 2.2, 1.9, 2.1])
    >>> round(low, 2), round(high, 2)
    (4.52, 5.71)
    >>> fieller([9.0, 11.0, 10.0, 12.0], [2.0, -2.2, 1.9, -2.1])[1]
    inf
    """
    count, quantile = len(above), student_quantile(len(above) - 1)
    mean_above, mean_below = _mean(above), _mean(below)
    factor = quantile**2 / (count - 1) / count

    def spread(one: Sequence[float], other: Sequence[float]) -> float:
        middle, center = _mean(one), _mean(other)
        return factor * math.fsum((a - middle) * (b - center) for a, b in zip(one, other, strict=True))

    square = mean_below**2 - spread(below, below)
    half = mean_above * mean_below - spread(above, below)
    rest = mean_above**2 - spread(above, above)
    inside = half**2 - square * rest
    if inside < 0 or square == 0:
        return 0.0, math.inf
    roots = sorted(((half - math.sqrt(inside)) / square, (half + math.sqrt(inside)) / square))
    if square > 0 and mean_below > 0:
        return max(roots[0], 0.0), max(roots[1], 0.0)
    return (max(roots[1], 0.0) if rest > 0 and square < 0 else 0.0), math.inf


def student_quantile(freedom: int) -> float:
    """Student's t of 0.95, by its expansion around the normal quantile; within 1 % from 4 degrees of freedom on.

    >>> round(student_quantile(4), 2), round(student_quantile(30), 3)
    (2.13, 1.697)
    """
    z = NORMAL_QUANTILE
    second, third = 5 * z**5 + 16 * z**3 + 3 * z, 3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z
    return z + (z**3 + z) / (4 * freedom) + second / (96 * freedom**2) + third / (384 * freedom**3)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSums:
    """The micro-batches of one batch, of all ranks, as sums."""

    squares: float
    """sum_k |g_k|^2 of the parts that add up to the batch's gradient."""
    share_squares: float
    """sum_k (units_k / units)^2."""
    rows: float


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
        self.found: NormSums | str = ""
        """The sums, or why there are none."""

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
        seen = [square for squares in self._passes for square in squares]
        is_alike = len({(square.device, square.dtype) for square in seen}) == 1
        squares = math.fsum(torch.stack(seen).tolist() if is_alike else [square.item() for square in seen])
        is_sound = self._is_whole and is_in_arrival_order(cut)
        try:
            rows = sum(len(numbers) for numbers in cut.row_numbers)
        except BatchError:  # micro-batches of the user's own making
            rows, is_sound = 0, False
        return [squares if is_sound else math.nan, sum(one * one for one in units), rows]

    def receive(self, totals: Sequence[float], units: float, factor: Callable[[], float]) -> None:
        squares, unit_squares, rows = totals
        squares *= factor() ** 2
        shares = unit_squares / (units * units) if units else math.nan
        if not math.isfinite(squares):
            self.found = (
                "the norms of single micro-batches were not to be had: a gradient is not finite, a split of your own moves "
                "rows, rows cannot be counted, or reentrant checkpointing makes a parameter's gradient in parts (use "
                "use_reentrant=False)"
            )
        elif not units:
            self.found = "the batch has no units"
        elif shares > 1.0 - 1e-12:
            self.found = ONE_MICRO_BATCH
        else:
            self.found = NormSums(squares=squares, share_squares=shares, rows=rows)

    def _see(self, number: int, grad: Tensor) -> None:
        self._is_whole = self._is_whole and number not in self._seen
        values = grad.coalesce().values() if grad.is_sparse else grad
        self._seen[number] = _square(values)


def _square(values: Tensor) -> Tensor:
    """Sum squares in fp32 at least."""
    if values.dtype in (torch.float32, torch.float64):
        flat = values.reshape(-1)
        return torch.dot(flat, flat)
    norm: Tensor = torch.linalg.vector_norm(values, dtype=torch.promote_types(values.dtype, torch.float32))
    return norm.square()


ONE_MICRO_BATCH = (
    "one micro-batch holds all that counts of a batch, and its gradient alone says nothing of noise: use a smaller "
    "micro_batch"
)


MOST_WINDOWS = 100
"""Older ones are forgotten, because the noise scale grows while a model learns."""


class NoiseHistory:
    """One update in `every` is measured, beginning with the first: the gradients of `parameters()`."""

    def __init__(self, every: int, parameters: Callable[[], Sequence[nn.Parameter]]) -> None:
        self._every = every
        self._parameters = parameters
        self._num_updates = 0
        self.windows: deque[WindowNoise] = deque(maxlen=MOST_WINDOWS)
        self._reason = ""
        self.scale: NoiseScale | None = None
        self._hook: PassNorms | None = None
        self._refusal = ""

    @property
    def reason(self) -> str | None:
        count = len(self.windows)
        if count >= FEWEST_WINDOWS:
            return None
        return self._reason or f"{count} of {FEWEST_WINDOWS} windows are measured, one update in {self._every}"

    @property
    def is_due(self) -> bool:
        """True if the next update is one to be measured."""
        return self._num_updates % self._every == 0

    def hook(self, *, no_partial_gradients_because: str, is_sharded: bool, num_micro_batches: int) -> PassNorms | None:
        """Give the hook that measures the next batch; None where it is not due, or why not is noted as the reason."""
        self._hook, self._refusal = None, ""
        if not self.is_due:
            return None
        if is_sharded and not no_partial_gradients_because:
            no_partial_gradients_because = (
                "a model sharded by fully_shard adds gradients up inside FSDP2, and no micro-batch's own is seen"
            )
        self._refusal = no_partial_gradients_because or (ONE_MICRO_BATCH if num_micro_batches == 1 else "")
        self._hook = None if self._refusal else PassNorms(self._parameters())
        return self._hook

    def add(self, norm: Any, *, applied: bool) -> None:
        """Count one more update; `norm` is that of its gradient."""
        found = self._refusal if self._hook is None else self._hook.found
        self._hook, self._refusal = None, ""
        self._num_updates += 1
        if isinstance(found, str):
            self._reason = found or self._reason
        elif applied:
            self.windows.append(WindowNoise.of(float(norm), found.squares, found.share_squares, found.rows))
            self._reason = ""
            self._estimate()

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self._num_updates, "windows": [(one.row_noise, one.signal) for one in self.windows]}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        if state is not None:  # a checkpoint of a run that was not measured has nothing to go on from
            self._num_updates = state["updates"]
            self.windows = deque((WindowNoise(*one) for one in state["windows"]), maxlen=MOST_WINDOWS)
            self._estimate()

    def _estimate(self) -> None:
        self.scale = noise_scale_of(self.windows) if len(self.windows) >= FEWEST_WINDOWS else None

"""`noise_scale`: the gradient noise of measured updates, from the norms of their micro-batches' gradients."""

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
"""The interval from four windows would be twice as wide as that from eight."""
MOST_WINDOWS = 100
"""Older windows are forgotten, because the noise scale grows while a model learns."""
NORMAL_QUANTILE = 1.6448536269514722
"""0.95 quantile of the normal distribution: the interval leaves out 5 % on either side."""
ONE_MICRO_BATCH = (
    "one micro-batch holds all that counts of a batch, and its gradient alone says nothing of noise: use a smaller "
    "micro_batch"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseScale:
    """Gradient noise scale, rows * |noise|^2 / |signal|^2; it depends on data and weights, not on the batch size.

    Args:
        rows: The estimate, in rows; inf if no signal was seen.
        low: Lower end of the 90 % interval, by Fieller's theorem.
        high: Upper end; inf if the signal cannot be told from 0.
        windows: Number of measured updates behind it.
    """

    rows: float
    low: float
    high: float
    windows: int


class NoiseHistory:
    """Measurements of one update in `every`, beginning with the first, of the gradients of `parameters()`."""

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
        """Why there is no estimate yet; None if there is one."""
        count = len(self.windows)
        if count >= FEWEST_WINDOWS:
            return None
        return self._reason or f"{count} of {FEWEST_WINDOWS} windows are measured, one update in {self._every}"

    @property
    def is_due(self) -> bool:
        """True if the next update is to be measured."""
        return self._num_updates % self._every == 0

    def hook(
        self, *, no_partial_gradients_because: str, is_sharded: bool, num_micro_batches: int
    ) -> "PassNorms | None":
        """Return the hook that measures the next batch; None if it is not due, or cannot be measured."""
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
        """Count one more update, whose gradient has this norm."""
        found = self._refusal if self._hook is None else self._hook.found
        self._hook, self._refusal = None, ""
        self._num_updates += 1
        if isinstance(found, str):
            self._reason = found or self._reason
        elif applied:
            self.windows.append(WindowNoise.of(float(norm), *found))
            self._reason = ""
            self._estimate()

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self._num_updates, "windows": [(one.row_noise, one.signal) for one in self.windows]}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        if state is not None:  # None comes from a checkpoint of a run without measurements
            self._num_updates = state["updates"]
            self.windows = deque((WindowNoise(*one) for one in state["windows"]), maxlen=MOST_WINDOWS)
            self._estimate()

    def _estimate(self) -> None:
        self.scale = noise_scale_of(self.windows) if len(self.windows) >= FEWEST_WINDOWS else None


class PassNorms(PassHook):
    """Measures the gradient norms of the passes of one batch, whose rows are split in the order in which they came.

    Rows sorted by length would make strata: differences between micro-batches would count as noise of rows. Norms stay on the
    device until `numbers`, and no gradient is copied.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._seen: dict[int, Tensor] = {}
        self._passes: list[list[Tensor]] = []
        self._is_whole = True
        """False once a parameter's gradient came in parts, as in reentrant checkpointing; their squares do not add up."""
        self.found: tuple[float, float, float] | str = ""
        """`squares`, `share_squares` and `rows` of `WindowNoise.of`, over all ranks; or why they are missing."""

    @contextmanager
    def around_counted(self) -> Iterator[None]:
        self._seen, self._passes = {}, []
        trained = [(number, one) for number, one in enumerate(self._parameters) if one.requires_grad]
        hooks = [parameter.register_hook(partial(self._see, number)) for number, parameter in trained]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _see(self, number: int, grad: Tensor) -> None:
        """Sum the squares of one gradient, in fp32 at least."""
        self._is_whole = self._is_whole and number not in self._seen
        values = grad.coalesce().values() if grad.is_sparse else grad
        if values.dtype in (torch.float32, torch.float64):
            flat = values.reshape(-1)
            self._seen[number] = torch.dot(flat, flat)
        else:
            dtype = torch.promote_types(values.dtype, torch.float32)
            self._seen[number] = torch.linalg.vector_norm(values, dtype=dtype).square()

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
        except BatchError:  # micro-batches that the user made
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
        else:
            self.found = ONE_MICRO_BATCH if shares > 1.0 - 1e-12 else (squares, shares, rows)


@dataclass(frozen=True, slots=True)
class WindowNoise:
    """Unbiased estimates from one batch."""

    row_noise: float
    """|noise|^2 of the gradient of a single row."""
    signal: float
    """|gradient of all rows of the data|^2; the estimate of one batch may be below 0."""

    @staticmethod
    def of(norm: float, squares: float, share_squares: float, rows: float) -> "WindowNoise":
        """Estimate from |g| of the batch, sum_k |g_k|^2 of the parts that add up to g, and sum_k (units_k / units)^2.

            signal = (|S|^2 - sum_k |S_k|^2) / (U^2 - sum_k U_k^2),  noise = (sum_k |S_k|^2 - signal * sum_k U_k^2) / U^2

        with S_k = U * g_k. Products of different micro-batches hold no noise, because their rows were drawn independently. The
        estimates are unbiased for any split that does not depend on the contents of rows, any sizes and any units.
        """
        signal = (norm * norm - squares) / (1.0 - share_squares)
        return WindowNoise(rows * (squares - signal * share_squares), signal)


def noise_scale_of(windows: Sequence[WindowNoise]) -> NoiseScale:
    """Divide the means over two or more windows. A mean of their ratios would be biased, and may divide by nearly 0."""
    noise, signal = [one.row_noise for one in windows], [one.signal for one in windows]
    ratio = _mean(noise) / _mean(signal) if _mean(signal) > 0 else math.inf
    low, high = fieller(noise, signal)
    return NoiseScale(rows=max(ratio, 0.0), low=low, high=high, windows=len(windows))


def fieller(above: Sequence[float], below: Sequence[float]) -> tuple[float, float]:
    """Return the 90 % interval of mean(above) / mean(below), both of the same draws, for a ratio of 0 or more.

    It holds all r for which mean(above - r * below) cannot be told from 0: those between the roots of a quadratic, or above
    the upper root if mean(below) itself cannot be told from 0.

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
    """Return Student's t of 0.95, by expansion around the normal quantile; within 1 % from 4 degrees of freedom on.

    >>> round(student_quantile(4), 2), round(student_quantile(30), 3)
    (2.13, 1.697)
    """
    z = NORMAL_QUANTILE
    second, third = 5 * z**5 + 16 * z**3 + 3 * z, 3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z
    return z + (z**3 + z) / (4 * freedom) + second / (96 * freedom**2) + third / (384 * freedom**3)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)

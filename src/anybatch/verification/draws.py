"""Random draws of torch, replayed row by row: rows draw what they drew in the whole batch, however it is cut.

A dispatch mode sees every operation that torch tags as drawing from a generator, below `F.dropout`, `nn.Dropout`, attention
and a model's own code. The dimension of the rows follows from two shapes: if the whole batch drew B x m numbers and b of its
rows draw b x m, it is the first.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from anybatch.core import TorchDispatchMode, is_in_backward, op_name

_SEEDED = torch.Tag.nondeterministic_seeded
FIRST_SEED = 0xB47C


@dataclass(frozen=True, slots=True)
class Draw:
    """Random numbers that one operation drew for the whole batch."""

    operation: str
    numbers: Tensor
    state: bytes
    """State of its generator before the draw."""


@dataclass(frozen=True, slots=True)
class Draws:
    """Draws of one forward of the whole batch, in order, and findings about those of micro-batches."""

    num_rows: int
    is_left: bool = False
    """True if padding is cut off at the beginning of rows."""
    is_quiet: bool = False
    """True to replace every draw by its mean."""
    whole: list[Draw] = field(default_factory=list)
    strange: list[str] = field(default_factory=list)
    """Draws of micro-batches that were not found among those of the whole batch."""
    shared: dict[int, str] = field(default_factory=dict)
    """Draws that all rows of a micro-batch share, by number."""
    seeded: list[str] = field(default_factory=list)
    """Draws from a generator that every forward seeds again."""
    orders: list[str] = field(default_factory=list)
    """Permutations of the rows."""
    unlike: list[str] = field(default_factory=list)
    """Draws of a forward that ran twice, from a generator that had moved on the second time."""
    again: list[str] = field(default_factory=list)
    """Draws in backward, where checkpointed blocks run again."""
    _own: dict[tuple[tuple[int, ...], int], bytes] = field(default_factory=dict)
    """(rows, number of the draw) -> state of the user's own generator, in one run."""
    _seen: dict[bytes, tuple[tuple[int, ...], int]] = field(default_factory=dict)
    """State of the generator before a draw -> (rows, number of the draw); identifies draws that checkpointing repeats."""

    @property
    def is_drawn(self) -> bool:
        return bool(self.whole or self.strange)

    def start(self) -> None:
        """Clear everything before the whole batch runs."""
        lists = (self.whole, self.strange, self.seeded, self.orders, self.unlike, self.again)
        for held in (*lists, self.shared, self._seen):
            held.clear()

    def start_run(self) -> None:
        """Clear the states of the user's own generators, which start again with each run."""
        self._own.clear()


def drawing(draws: Draws, rows: Sequence[int] | None) -> AbstractContextManager[None]:
    """Surround a forward: record the draws of the whole batch, or replay those of `rows`."""
    return recording(draws) if rows is None else replaying(draws, rows)


@contextmanager
def recording(draws: Draws) -> Iterator[None]:
    """Record the draws of a forward of the whole batch."""
    torch.manual_seed(FIRST_SEED)
    with _Recording(draws):
        yield


@contextmanager
def replaying(draws: Draws, rows: Sequence[int], *, is_later: bool = False) -> Iterator[None]:
    """Let a forward of these rows, in this order, draw what they drew in the whole batch.

    With `is_later` another micro-batch ran before it, so that the user's own generators have moved on.
    """
    torch.manual_seed(FIRST_SEED + 1 + hash(tuple(rows)) % 2**31)
    if draws.is_drawn:
        with _Replaying(draws, tuple(rows), is_later):
            yield
        return
    before = torch.get_rng_state()  # a dispatch mode would double the time
    yield
    is_alone = threading.current_thread() is threading.main_thread()  # forwards in lockstep share the generator
    if is_alone and not torch.equal(before, torch.get_rng_state()):
        draws.strange.append("a micro-batch draws where the whole batch drew nothing")


@contextmanager
def recomputing(draws: Draws, *, is_first: bool = False) -> Iterator[None]:
    """Let checkpointed forwards that run again in backward draw as they did the first time.

    With `is_first`, for the whole batch, only note whether there are any.
    """
    with _Noticing(draws) if is_first else _Replaying(draws, None, False) if draws.again else nullcontext():
        yield


class _Noticing(TorchDispatchMode):
    """Dispatch mode that notes operations that draw."""

    def __init__(self, draws: Draws) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws = draws

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _SEEDED in func.tags:
            self._draws.again.append(op_name(func))
        return func(*args, **(kwargs or {}))


class _Recording(_Noticing):
    """Dispatch mode that keeps the numbers that operations draw."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _SEEDED not in func.tags or not self._is_watched():
            return func(*args, **kwargs)
        state = generator_state(func, args, kwargs)
        result = func(*args, **kwargs)
        numbers = drawn_by(func, result)
        if numbers is not None:
            if self._draws.is_quiet:
                put_numbers(func, args, result, numbers, mean_of(func, args, numbers))
            taken = self._see(func, numbers, state, is_own=kwargs.get("generator") is not None)
            if taken is not None:
                put_numbers(func, args, result, numbers, taken)
        elif state != generator_state(func, args, kwargs):
            self._draws.strange.append(f"{func} draws inside one kernel")
        return result

    def _is_watched(self) -> bool:
        return True

    def _see(self, func: Any, numbers: Tensor, state: bytes, *, is_own: bool) -> Tensor | None:
        """Return the numbers to put in place of those drawn; None to leave them."""
        self._draws.whole.append(Draw(str(func), numbers.detach().clone(), state))
        return None


class _Replaying(_Recording):
    """Dispatch mode that replaces draws by those of the same rows in the whole batch."""

    def __init__(self, draws: Draws, rows: tuple[int, ...] | None, is_later: bool) -> None:
        super().__init__(draws)
        self._rows = rows
        self._is_later = is_later
        self._next = 0

    def _is_watched(self) -> bool:
        return self._rows is not None or is_in_backward()

    def _see(self, func: Any, numbers: Tensor, state: bytes, *, is_own: bool) -> Tensor | None:
        if self._draws.is_quiet:
            return None
        if self._rows is None:  # backward runs a forward again
            found = self._draws._seen.get(state)
            return None if found is None else self._take(func, numbers, *found)
        number = self._next
        self._next += 1
        self._draws._seen[state] = (self._rows, number)
        name = op_name(func).removeprefix("aten::")
        known = self._draws.whole[number].state if number < len(self._draws.whole) else None
        if state == known and (self._is_later or not is_own):
            self._draws.seeded.append(name)
        elif is_own and self._draws._own.setdefault((self._rows, number), state) != state:
            self._draws.unlike.append(name)
        return self._take(func, numbers, self._rows, number)

    def _take(self, func: Any, numbers: Tensor, rows: tuple[int, ...], number: int) -> Tensor | None:
        whole = self._draws.whole[number] if number < len(self._draws.whole) else None
        shape = tuple(numbers.shape)
        if whole is None or whole.operation != str(func):
            there = "nothing" if whole is None else f"{whole.operation} of {tuple(whole.numbers.shape)}"
            self._draws.strange.append(f"{func} of {shape} where the whole batch drew {there}")
            return None
        name = op_name(func).removeprefix("aten::")
        is_part = len(rows) < self._draws.num_rows
        if name == "randperm" and tuple(whole.numbers.shape) != shape:
            self._draws.orders.append(f"{name} of {shape[0]}")
            return None
        if is_part and tuple(whole.numbers.shape) == shape:
            self._draws.shared[number] = f"{name} of {'one number' if numbers.numel() == 1 else shape}"
        taken = rows_of_draw(whole.numbers, shape, rows, self._draws)
        if taken is None:
            self._draws.strange.append(f"{func} of {shape} where the whole batch drew {tuple(whole.numbers.shape)}")
        return taken


def rows_of_draw(whole: Tensor, shape: tuple[int, ...], rows: Sequence[int], draws: Draws) -> Tensor | None:
    """Return the numbers of `rows` among those of the whole batch, in `shape`; None if no dimension can be the rows.

    The rows are the first dimension that is longer in the whole batch, in proportion or with padding cut off. If all rows
    are there, they are the first dimension that their number divides. Any other shorter dimension has lost padding. A draw
    of the same shape for any number of rows is shared by all.
    """
    if whole.dim() != len(shape) or any(wanted > length for length, wanted in zip(whole.shape, shape, strict=True)):
        return None
    is_all = len(rows) == draws.num_rows
    taken, is_found = whole, False
    for dim, (length, wanted) in enumerate(zip(whole.shape, shape, strict=True)):
        can_be_rows = length > 0 and length % draws.num_rows == 0 and wanted % len(rows) == 0
        can_be_rows = can_be_rows and wanted // len(rows) <= length // draws.num_rows
        if not is_found and can_be_rows and (is_all or wanted < length):
            each = taken.unflatten(dim, (draws.num_rows, -1)).index_select(dim, torch.tensor(rows, device=whole.device))
            taken, is_found = _keep(each, dim + 1, wanted // len(rows), draws.is_left).flatten(dim, dim + 1), True
        else:
            taken = _keep(taken, dim, wanted, draws.is_left)
    return taken if is_found or tuple(whole.shape) == shape else None


def _keep(numbers: Tensor, dim: int, wanted: int, is_left: bool) -> Tensor:
    return numbers.narrow(dim, numbers.shape[dim] - wanted if is_left else 0, wanted)


_DROPOUT = torch.ops.aten.native_dropout.default


def drawn_by(func: Any, result: Any) -> Tensor | None:
    """Return the tensor of random numbers among the results; None for kernels that do not return it."""
    if func is _DROPOUT:
        return result[1]  # type: ignore[no-any-return]
    return result if isinstance(result, Tensor) and op_name(func) in _PURE else None


def put_numbers(func: Any, args: Any, result: Any, numbers: Tensor, taken: Tensor) -> None:
    """Replace the drawn `numbers` by `taken`, and the result of dropout accordingly."""
    numbers.copy_(taken)
    if func is _DROPOUT:
        torch.mul(args[0], numbers, out=result[0]).mul_(0.0 if args[1] == 1 else 1 / (1 - args[1]))


def mean_of(func: Any, args: Any, numbers: Tensor) -> Tensor:
    """Return the mean of a draw: masks keep everything, noise is 0, permutations change nothing."""
    name = op_name(func).removeprefix("aten::")
    if name == "randperm":
        return torch.arange(numbers.numel(), dtype=numbers.dtype, device=numbers.device)
    if name == "bernoulli_" and numbers.is_floating_point():
        # dropout divides by the share that it keeps: filled with that share, it keeps everything as it is
        share = args[1] if len(args) > 1 else 0.5
        return share.expand_as(numbers) if isinstance(share, Tensor) else torch.full_like(numbers, share)
    if name in ("bernoulli", "bernoulli_") or func is _DROPOUT:
        return torch.ones_like(numbers)
    is_noise = name in ("normal", "normal_", "randn", "randn_like") or not numbers.is_floating_point()
    return torch.full_like(numbers, 0.0 if is_noise else 0.5)


_NAMES = """bernoulli bernoulli_ binomial cauchy_ exponential_ geometric_ log_normal_ multinomial normal normal_ poisson rand
rand_like randint randint_like randn randn_like randperm random_ uniform_ _standard_gamma _sample_dirichlet"""
_PURE = frozenset(f"aten::{name}" for name in _NAMES.split())
"""Operations that return the draw itself."""


def generator_state(func: Any, args: Any, kwargs: Any) -> bytes:
    """Return a hash of the generator's state: 16 bytes in place of 5,056 for each draw."""
    generator = kwargs.get("generator")
    if generator is None:
        device = next((value.device for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        device = torch.device(device or kwargs.get("device") or "cpu")
        state = torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
    else:
        state = generator.get_state()
    return blake2b(state.cpu().numpy().tobytes(), digest_size=16).digest()

"""Random draws of torch, held fixed row by row: what the whole batch drew, its rows draw again however they are cut.

Every operation that torch tags as drawing from a generator is seen by a dispatch mode, below `F.dropout`, `nn.Dropout`,
attention and any code of a model's own. Which dimension of a draw is the rows is read off its two shapes: where the whole
batch drew B x m numbers, and b of its rows draw b x m, the rows are there.
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
    """Draws of one forward of the whole batch, in order, and what was seen when micro-batches drew again."""

    num_rows: int
    is_left: bool = False
    """True if padding is cut off at the beginning of rows."""
    is_quiet: bool = False
    """True to replace every draw by its mean, the same for all rows."""
    whole: list[Draw] = field(default_factory=list)
    strange: list[str] = field(default_factory=list)
    """Draws of micro-batches that could not be found among those of the whole batch."""
    shared: dict[int, str] = field(default_factory=dict)
    """Draws that are one for all rows of a micro-batch, by number."""
    seeded: list[str] = field(default_factory=list)
    """Draws from a generator that every forward starts anew."""
    orders: list[str] = field(default_factory=list)
    """Orders of the rows."""
    unlike: list[str] = field(default_factory=list)
    """Draws of a forward that ran twice, the second time from a generator that had moved on."""
    again: list[str] = field(default_factory=list)
    """Draws in backward, where checkpointed blocks run again."""
    _own: dict[tuple[tuple[int, ...], int], bytes] = field(default_factory=dict)
    """States of generators that somebody holds, by rows and number of the draw, in one run."""
    _seen: dict[bytes, tuple[tuple[int, ...], int]] = field(default_factory=dict)
    """State of the generator before a draw -> (rows, number of the draw): a forward that checkpointing runs again is met so."""

    @property
    def is_drawn(self) -> bool:
        """True where anything was drawn."""
        return bool(self.whole or self.strange)

    def start(self) -> None:
        """Forget everything: the whole batch runs next."""
        lists = (self.whole, self.strange, self.seeded, self.orders, self.unlike, self.again)
        for held in (*lists, self.shared, self._seen):
            held.clear()

    def start_run(self) -> None:
        """Another run begins, from generators as they were at first."""
        self._own.clear()


def drawing(draws: Draws, rows: Sequence[int] | None) -> AbstractContextManager[None]:
    """Surround a forward: record the draws of the whole batch, or replay those of `rows`."""
    return recording(draws) if rows is None else replaying(draws, rows)


@contextmanager
def recording(draws: Draws) -> Iterator[None]:
    """The forward of the whole batch, whose draws are kept."""
    torch.manual_seed(FIRST_SEED)
    with _Recording(draws):
        yield


@contextmanager
def replaying(draws: Draws, rows: Sequence[int], *, is_later: bool = False) -> Iterator[None]:
    """A forward of these rows of the batch, in this order, which draws what they drew in the whole batch.

    `is_later`: another micro-batch ran before it, so that a generator that somebody holds has moved on.
    """
    torch.manual_seed(FIRST_SEED + 1 + hash(tuple(rows)) % 2**31)
    if draws.is_drawn:
        with _Replaying(draws, tuple(rows), is_later):
            yield
        return
    before = torch.get_rng_state()  # watching every operation costs as much as running it
    yield
    is_alone = threading.current_thread() is threading.main_thread()  # forwards in lockstep seed amid each other
    if is_alone and not torch.equal(before, torch.get_rng_state()):
        draws.strange.append("a micro-batch draws where the whole batch drew nothing")


@contextmanager
def recomputing(draws: Draws, *, is_first: bool = False) -> Iterator[None]:
    """Backward passes, in which checkpointed forwards run again and draw as they did the first time.

    `is_first`: those of the whole batch, which show whether there is anything to watch.
    """
    with _Noticing(draws) if is_first else _Replaying(draws, None, False) if draws.again else nullcontext():
        yield


class _Noticing(TorchDispatchMode):
    """Notes operations that draw."""

    def __init__(self, draws: Draws) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws = draws

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _SEEDED in func.tags:
            self._draws.again.append(op_name(func))
        return func(*args, **(kwargs or {}))


class _Recording(_Noticing):
    """Keeps the numbers that operations draw."""

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
        """Numbers that take the place of those that were drawn; None to leave them."""
        self._draws.whole.append(Draw(str(func), numbers.detach().clone(), state))
        return None


class _Replaying(_Recording):
    """Lets operations draw what their rows drew in the whole batch."""

    def __init__(self, draws: Draws, rows: tuple[int, ...] | None, is_later: bool) -> None:
        super().__init__(draws)
        self._rows = rows
        self._is_later = is_later
        self._next = 0

    def _is_watched(self) -> bool:
        return (
            self._rows is not None or is_in_backward()
        )  # outside a forward of known rows, only what backward runs again

    def _see(self, func: Any, numbers: Tensor, state: bytes, *, is_own: bool) -> Tensor | None:
        found = None if self._draws.is_quiet else self._find(state)
        if found is None:
            return None
        rows, number = found
        self._look(func, state, number, is_own=is_own)
        return self._take(func, numbers, rows, number)

    def _find(self, state: bytes) -> tuple[tuple[int, ...], int] | None:
        if self._rows is None:
            return self._draws._seen.get(state)
        place = (self._rows, self._next)
        self._next += 1
        self._draws._seen[state] = place
        return place

    def _look(self, func: Any, state: bytes, number: int, *, is_own: bool) -> None:
        """Note a generator that the forward put to the very place where it was in the whole batch, or that moved on."""
        if self._rows is None:
            return
        name = op_name(func).removeprefix("aten::")
        known = self._draws.whole[number].state if number < len(self._draws.whole) else None
        if state == known and (self._is_later or not is_own):
            self._draws.seeded.append(name)
        elif is_own and self._draws._own.setdefault((self._rows, number), state) != state:
            self._draws.unlike.append(name)

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
    """The numbers of `rows` among those of the whole batch, in `shape`; None where no dimension can be the rows.

    The rows are the first dimension that is longer in the whole batch, in proportion, or with padding cut off; where all rows
    are there, the first that they divide. Any other dimension that is shorter has lost padding. A draw of the same shape
    whatever the rows is everybody's.
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
    """The tensor of random numbers among the results; None for kernels that do not show it."""
    if func is _DROPOUT:
        return result[1]  # type: ignore[no-any-return]
    return result if isinstance(result, Tensor) and op_name(func) in _PURE else None


def put_numbers(func: Any, args: Any, result: Any, numbers: Tensor, taken: Tensor) -> None:
    """Let the operation have drawn `taken`."""
    numbers.copy_(taken)
    if func is _DROPOUT:
        torch.mul(args[0], numbers, out=result[0]).mul_(0.0 if args[1] == 1 else 1 / (1 - args[1]))


def mean_of(func: Any, args: Any, numbers: Tensor) -> Tensor:
    """The mean in place of a draw: masks let everything through, noise is 0, orders are as they were."""
    name = op_name(func).removeprefix("aten::")
    if name == "randperm":
        return torch.arange(numbers.numel(), dtype=numbers.dtype, device=numbers.device)
    if name in ("bernoulli", "bernoulli_"):
        # dropout divides by the share that it keeps: filled with that share, it keeps everything as it is
        share = args[1] if name == "bernoulli_" and len(args) > 1 else 0.5
        if name == "bernoulli_" and numbers.is_floating_point():
            return torch.full_like(numbers, share) if not isinstance(share, Tensor) else share.expand_as(numbers)
        return torch.ones_like(numbers)
    if func is _DROPOUT:
        return torch.ones_like(numbers)
    fill = {"normal": 0.0, "normal_": 0.0, "randn": 0.0, "randn_like": 0.0}.get(name, 0.5)
    return torch.full_like(numbers, fill if numbers.is_floating_point() else 0)


_NAMES = """bernoulli bernoulli_ binomial cauchy_ exponential_ geometric_ log_normal_ multinomial normal normal_ poisson rand
rand_like randint randint_like randn randn_like randperm random_ uniform_ _standard_gamma _sample_dirichlet"""
_PURE = frozenset(f"aten::{name}" for name in _NAMES.split())
"""Operations whose result is the draw itself."""


def generator_state(func: Any, args: Any, kwargs: Any) -> bytes:
    """Hash of the generator's state, 16 bytes: the state takes 5,056, and each draw keeps one."""
    generator = kwargs.get("generator")
    if generator is None:
        device = next((value.device for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        device = torch.device(device or kwargs.get("device") or "cpu")
        state = torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
    else:
        state = generator.get_state()
    return blake2b(state.cpu().numpy().tobytes(), digest_size=16).digest()

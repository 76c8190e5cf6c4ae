"""Work in place that memory runs out in: what it writes, in which order, and how it goes on where it stopped."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from anybatch.batches import tensors
from anybatch.errors import MemoryLimitError, first_line
from anybatch.parallel import is_sharded
from anybatch.state import free_memory, is_out_of_memory, once_more
from anybatch.torch_inside import FakeTensor, StorageWeakRef, TorchDispatchMode, num_writes, storage_key

READS_A_NUMBER = "aten::_local_scalar_dense"
"""What `.item()` and `bool()` call: from there on Python code knows the number."""
IS_FRESH = "aten::lift_fresh"
"""What a new tensor of Python numbers comes through: its memory may be that of one which is gone."""
SMALL = 2**20
"""Blocks smaller than this are taken as one."""


class WritesSeen(TorchDispatchMode):
    """Inside this block every op is followed: which of the `changing` tensors it writes to, and what that was computed from.

    An op is by torch's naming one that writes where its name ends with an underscore, to its first argument, or has `out`.
    """

    def __init__(self, changing: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_writes: Counter[int] = Counter({_key(tensor): 0 for tensor in changing})
        """Of each tensor, by its storage, so far."""
        self.has_old = False
        """True where something was computed from a tensor, the tensor was written to, and then the first was used to write."""
        self._made: dict[int, dict[int, int]] = {}
        self._numbers: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = [key for key in map(_key, _written(func, args, kwargs)) if key in self.num_writes]
        read = {} if func.name() == IS_FRESH else self._read(args, kwargs)
        if func.name() == READS_A_NUMBER:
            self._numbers |= read
        elif written:
            is_old = any(self.num_writes[key] != count for key, count in {**self._numbers, **read}.items())
            self.has_old = self.has_old or is_old
            result = self.write(func, args, kwargs, written, is_old=is_old)
            self.num_writes.update(written)
            return result
        result = self.run(func, args, kwargs)
        for tensor in _all_tensors((result,), {}):
            self._made[_key(tensor)] = read
        return result

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An op that writes to none of the tensors."""
        return func(*args, **kwargs)

    def write(self, func: Any, args: Any, kwargs: Any, written: list[int], *, is_old: bool) -> Any:
        """One that does."""
        return func(*args, **kwargs)

    def _read(self, args: Any, kwargs: Any) -> dict[int, int]:
        """What the arguments were computed from: tensors that change, each with its number of writes then."""
        read: dict[int, int] = {}
        for key in map(_key, _all_tensors(args, kwargs)):
            read |= {key: self.num_writes[key]} if key in self.num_writes else self._made.get(key, {})
        return read


@dataclass(frozen=True, slots=True)
class StepNeeds:
    """What one step was seen to need, and whether a later one like it could go on where it stopped."""

    is_resumable: bool
    by_ops: bool
    """True where torch does not count every write: those of ops over lists, and through `.data`."""
    blocks: tuple[tuple[torch.device, int], ...]
    """Device and bytes of what was alive at once beside what changes, when that was most."""


class StepStudy(WritesSeen):
    """Looks at one step."""

    def __init__(self, stepped: Iterable[Tensor], changing: Iterable[Tensor]) -> None:
        self._stepped = {_key(tensor) for tensor in stepped}
        self._before = [(tensor, num_writes(tensor)) for tensor in changing]
        super().__init__(tensor for tensor, _ in self._before)
        self._alive: dict[int, tuple[StorageWeakRef, torch.device, int]] = {}
        self._blocks: list[tuple[torch.device, int]] = []

    def needs(self, *, draws: bool) -> StepNeeds:
        """What was seen. A step that draws, or writes unseen, cannot go on where it stopped."""
        is_seen = all(self.num_writes[key] for key in self._stepped)
        is_counted = all(num_writes(tensor) - was == self.num_writes[_key(tensor)] for tensor, was in self._before)
        blocks = [block for block in self._blocks if block[1] >= SMALL]
        rest = {device: 0 for device, _ in self._blocks}
        for device, nbytes in self._blocks:
            rest[device] += nbytes if nbytes < SMALL else 0
        return StepNeeds(is_seen and not self.has_old and not draws, not is_counted, (*blocks, *rest.items()))

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = super().run(func, args, kwargs)
        self._alive = {key: held for key, held in self._alive.items() if not held[0].expired()}
        for tensor in _all_tensors((result,), {}):
            key, storage = _key(tensor), tensor.untyped_storage()
            if key not in self.num_writes and key not in self._alive:
                self._alive[key] = StorageWeakRef(storage), tensor.device, storage.nbytes()
        blocks = [(device, nbytes) for _, device, nbytes in self._alive.values()]
        self._blocks = max(self._blocks, blocks, key=lambda held: sum(nbytes for _, nbytes in held))
        return result


class OpCount(TorchDispatchMode):
    """Counts the ops that are done: for steps over lists, of which there are few, however many parameters."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_done = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.num_done += not _is_told(func)
        return result


class WritesDone:
    """How far work in place has come when it fails, without a copy of anything: by torch's counts of writes, or by ops."""

    def __init__(self, changing: Iterable[Tensor], *, by_ops: bool) -> None:
        self._changing = list(changing)
        self._before = [] if by_ops else [num_writes(tensor) for tensor in self._changing]
        self._ops = OpCount() if by_ops else None

    def watched(self) -> AbstractContextManager[object]:
        """The block to do the work in."""
        return nullcontext() if self._ops is None else self._ops

    def resumed(self) -> AbstractContextManager[object]:
        """The block to do the work in again: writes that were done are left out of it."""
        if self._ops is not None:
            return _Resumed(self._changing, num_done=self._ops.num_done)
        counts = zip(self._changing, self._before, strict=True)
        return _Resumed(self._changing, done={_key(tensor): num_writes(tensor) - count for tensor, count in counts})


def change(parameters: Sequence[nn.Parameter], action: Callable[[], object], what: str) -> None:
    """Do `action`, which writes to gradients; where memory runs out in it, it goes on where it stopped."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not all(map(is_plain, gradients)):
        once_more(action)
        return
    progress = WritesDone(gradients, by_ops=True)
    for around in (progress.watched, progress.resumed):
        try:
            with around():
                action()
            return
        except Exception as error:
            if not is_out_of_memory(error) and not isinstance(error, MemoryLimitError):
                raise
            reason = first_line(error)
        free_memory()
    raise MemoryLimitError(
        f"memory ran out twice while the gradients were {what} ({reason}). Weights, optimizer, scheduler and scaler are as "
        "they were. Leave more room beside the gradients: a smaller model, or an optimizer with less state."
    )


def is_plain(tensor: Tensor) -> bool:
    """True of a tensor whose memory is its numbers: neither sparse, nor sharded, nor fake."""
    return tensor.layout is torch.strided and not is_sharded(tensor) and not isinstance(tensor, FakeTensor)


class _Resumed(WritesSeen):
    """Writes that were done are left out; one that would take what a later write has changed is an error, and is not done."""

    def __init__(self, changing: Iterable[Tensor], *, num_done: int = 0, done: dict[int, int] | None = None) -> None:
        super().__init__(changing)
        self._num_done = num_done
        self._done = done
        self._index = 0

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._index += not _is_told(func)
        return super().run(func, args, kwargs)

    def write(self, func: Any, args: Any, kwargs: Any, written: list[int], *, is_old: bool) -> Any:
        index, self._index = self._index, self._index + 1
        if self._done is None:
            was_done = {index < self._num_done}
        else:
            was_done = {self.num_writes[key] < self._done[key] for key in written}
        if was_done == {True}:
            return kwargs.get("out", args[0] if isinstance(args[0], Tensor) else None)
        if is_old or len(was_done) > 1 or (index == self._num_done and _mixes_dtypes(args)):
            raise MemoryLimitError(f"{func.name()} would take what a later operation has changed already.")
        return func(*args, **kwargs)


def _is_told(func: Any) -> bool:
    """True of what only tells a profiler, on the way in and on the way out, of work that failed too."""
    return bool(func.name().startswith("profiler::"))


def _mixes_dtypes(args: Any) -> bool:
    """True of an op over lists that casts in the middle of them, where memory may run out with some of them written."""
    lists = [[tensor.dtype for tensor in tensors(value)] for value in args if isinstance(value, list | tuple)]
    return any(len(set(dtypes)) > 1 for dtypes in zip(*filter(None, lists), strict=False))


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    if args and func.name().split(".")[0].endswith("_"):
        yield from _all_tensors(args[:1], {})
    yield from _all_tensors((kwargs.get("out"),), {})


def _all_tensors(args: Any, kwargs: Any) -> Iterator[Tensor]:
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors(value)


def _key(tensor: Tensor) -> int:
    return storage_key(tensor.untyped_storage())

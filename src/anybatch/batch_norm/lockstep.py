"""Several forwards that advance together: each runs until it needs something of all the others, and hands on the baton.

Each forward has a thread of its own, because a forward is a Python call that cannot be left and entered again in any other
way; but only the holder of the baton runs. The order is fixed (0, 1, 2, ... up to the meeting, then 0, 1, 2, ... again), so
random draws come in the same order every time.
"""

import contextvars
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from threading import Semaphore, Thread
from typing import Any, Generic, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from anybatch.core import TorchDispatchMode, dispatch_mode_stack, function_mode_stack
from anybatch.errors import LockstepError, MemoryLimitError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadState:
    """Grad mode, autocast, modes (fake tensors, default device, meters), intra-op threads, current device and stream."""

    is_grad_enabled: bool
    autocasts: tuple[tuple[str, torch.dtype], ...]
    is_autocast_cached: bool
    num_threads: int
    device_index: int | None
    stream: Any
    function_mode_stack: tuple[TorchFunctionMode, ...]
    dispatch_mode_stack: tuple[TorchDispatchMode, ...]
    context: contextvars.Context = field(repr=False)

    def run(self, work: Callable[[], T]) -> T:
        """Do `work` in this thread as if it ran where the state was taken."""
        torch.set_num_threads(self.num_threads)
        with ExitStack() as stack:
            if self.device_index is not None:
                torch.accelerator.set_device_index(self.device_index)
                torch.accelerator.set_stream(self.stream)
            stack.enter_context(torch.set_grad_enabled(self.is_grad_enabled))
            for device_type, dtype in self.autocasts:
                stack.enter_context(torch.autocast(device_type, dtype, cache_enabled=self.is_autocast_cached))
            for function_mode in self.function_mode_stack:
                stack.enter_context(function_mode)
            for dispatch_mode in self.dispatch_mode_stack:
                stack.enter_context(dispatch_mode)
            return self.context.copy().run(work)


def thread_state() -> ThreadState:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device_types = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    return ThreadState(
        is_grad_enabled=torch.is_grad_enabled(),
        autocasts=tuple(
            (device_type, torch.get_autocast_dtype(device_type))
            for device_type in device_types
            if torch.is_autocast_enabled(device_type)
        ),
        is_autocast_cached=torch.is_autocast_cache_enabled(),
        num_threads=torch.get_num_threads(),
        device_index=None if accelerator is None else torch.accelerator.current_device_index(),
        stream=None if accelerator is None else torch.accelerator.current_stream(),
        function_mode_stack=tuple(function_mode_stack()),
        dispatch_mode_stack=tuple(dispatch_mode_stack()),
        context=contextvars.copy_context(),
    )


V = TypeVar("V")
P = TypeVar("P")


class _Abandoned(BaseException):
    """Unwinds a forward that waits for one that failed. No Exception, so that no model catches it."""


@dataclass(slots=True)
class Lockstep(Generic[T]):
    """One batch's forwards, in lockstep. Used once."""

    forwards: Sequence[Callable[[], T]]
    numbers: Sequence[int]
    """The micro-batch of each forward, for errors."""
    _holder: int = 0
    _place: str = ""
    _arrived: list[Any] = field(default_factory=list)
    _pooled: Any = None
    _results: dict[int, T] = field(default_factory=dict)
    _ended: list[int] = field(default_factory=list)
    _error: BaseException | None = None
    _is_abandoned: bool = False
    _batons: list[Semaphore] = field(default_factory=list)
    _all_ended: Semaphore = field(default_factory=lambda: Semaphore(0))

    def run(self) -> list[T]:
        """Return the results of all forwards. An error in one ends them all, and no thread outlives this call."""
        state = thread_state()
        self._batons = [Semaphore(0) for _ in self.forwards]
        threads = [
            Thread(target=self._work, args=(index, state), name=f"anybatch-lockstep-{index}", daemon=True)
            for index in range(len(self.forwards))
        ]
        try:
            for thread in threads:
                self._start(thread)
            self._batons[0].release()
            self._all_ended.acquire()
        except BaseException:  # an interrupt while waiting, or no more threads
            self._is_abandoned = True
            raise
        finally:
            for baton in self._batons if self._is_abandoned else ():
                baton.release()
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return [self._results.pop(index) for index in range(len(self.forwards))]

    @property
    def current(self) -> int:
        """The number of the micro-batch that runs."""
        return self.numbers[self._holder]

    @property
    def is_over(self) -> bool:
        """True once every forward has ended."""
        return len(self._ended) == len(self.forwards)

    def meet(self, place: str, value: V, pool: Callable[[list[V]], P]) -> P:
        """Wait until every forward has come to `place` with its value; all get what `pool` makes of all values."""
        index = self._holder
        self._check_place(index, place)
        self._arrived.append(value)
        if len(self._arrived) == len(self.forwards):
            values, self._arrived = self._arrived, []
            self._pooled = pool(values)
            self._place = ""
            self._pass_on(0, index)
        else:
            self._place = place
            self._pass_on(index + 1, index)
        if self._is_abandoned:
            raise _Abandoned
        pooled: P = self._pooled
        return pooled

    def _check_place(self, index: int, place: str) -> None:
        if self._ended:
            raise LockstepError(
                f"micro-batch {self.numbers[index]} meets {place}, but micro-batch {self.numbers[self._ended[0]]} finished its "
                f"forward without it. {_RULE}"
            )
        if self._place and place != self._place:
            raise LockstepError(
                f"micro-batch {self.numbers[index]} meets {place}, where micro-batch {self.numbers[0]} met {self._place}. "
                f"{_RULE}"
            )

    def _pass_on(self, to: int, index: int) -> None:
        if to != index:
            self._batons[to].release()
            self._batons[index].acquire()
        self._holder = index

    def _start(self, thread: Thread) -> None:
        try:
            thread.start()
        except RuntimeError as error:  # smaller micro-batches would be more threads: this is not tried again
            raise MemoryLimitError(
                f"{error}: batch_norm='exact' runs each of {len(self.forwards)} micro-batches in a thread of its own, and the "
                "system allows no more of them, by number (ulimit -u), or by the memory that their stacks may take (ulimit -v, "
                "-d; each takes ulimit -s). Use larger micro-batches, or raise the limit."
            ) from error

    def _work(self, index: int, state: ThreadState) -> None:
        self._batons[index].acquire()
        self._holder = index
        try:
            if not self._is_abandoned:
                result = state.run(self.forwards[index])
                if self._arrived:
                    raise LockstepError(
                        f"micro-batch {self.numbers[index]} finished its forward without meeting {self._place}, at which "
                        f"micro-batch {self.numbers[0]} waits. {_RULE}"
                    )
                self._results[index] = result
        except _Abandoned:
            pass
        except BaseException as error:  # handed to the caller's thread, whatever it is
            self._error = self._error or error
            self._is_abandoned = True
        self._ended.append(index)
        if self.is_over:
            self._all_ended.release()
        else:
            # a failure wakes one after the other, each to unwind alone
            waiting = [other for other in range(len(self.forwards)) if other not in self._ended]
            self._batons[next((other for other in waiting if other > index), waiting[0])].release()


_RULE = (
    "batch_norm='exact' needs a forward that meets its BatchNorms in the same order for every micro-batch. Take the decision "
    "that depends on the data out of the forward, or use batch_norm='micro'."
)

"""Several forwards in lockstep: each runs until it needs values from all the others, then the next one runs.

Each forward has its own thread, because a Python call cannot be suspended in any other way. Only one thread runs at a time.
The order is fixed (0, 1, 2, ... up to the meeting, then 0, 1, 2, ... again), so that random draws come in the same order.
"""

import contextvars
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from threading import Semaphore, Thread
from typing import Any, Generic, TypeVar

import torch

from anybatch.core import dispatch_mode_stack, function_mode_stack
from anybatch.errors import LockstepError, MemoryLimitError

T = TypeVar("T")
V = TypeVar("V")
P = TypeVar("P")

_RULE = (
    "batch_norm='exact' needs a forward that meets its BatchNorms in the same order for every micro-batch. Take the decision "
    "that depends on the data out of the forward, or use batch_norm='micro'."
)


class _Abandoned(BaseException):
    """Unwinds a forward that waits for one that failed. Not an Exception, so that no model catches it."""


class Lockstep(Generic[T]):
    """The forwards of one batch; `numbers` are their micro-batches. Used once."""

    def __init__(self, forwards: Sequence[Callable[[], T]], numbers: Sequence[int]) -> None:
        self.forwards = forwards
        self.numbers = numbers
        self._running = 0
        self._place = ""
        self._arrived: list[Any] = []
        self._pooled: Any = None
        self._results: dict[int, T] = {}
        self._ended: list[int] = []
        self._error: BaseException | None = None
        self._is_abandoned = False
        self._turns = [Semaphore(0) for _ in forwards]
        self._all_ended = Semaphore(0)

    def run(self) -> list[T]:
        """Return the results of all forwards. An error in one ends them all, and no thread outlives this call."""
        in_state = _thread_state()
        threads = [
            Thread(target=self._work, args=(index, in_state), name=f"anybatch-lockstep-{index}", daemon=True)
            for index in range(len(self.forwards))
        ]
        try:
            for thread in threads:
                self._start(thread)
            self._turns[0].release()
            self._all_ended.acquire()
        except BaseException:  # an interrupt while waiting, or no more threads
            self._is_abandoned = True
            raise
        finally:
            for turn in self._turns if self._is_abandoned else ():
                turn.release()
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return [self._results.pop(index) for index in range(len(self.forwards))]

    @property
    def current(self) -> int:
        """Number of the micro-batch that runs."""
        return self.numbers[self._running]

    @property
    def is_over(self) -> bool:
        """True once every forward has ended."""
        return len(self._ended) == len(self.forwards)

    def meet(self, place: str, value: V, pool: Callable[[list[V]], P]) -> P:
        """Wait until every forward is at `place` with its value; return `pool(values)` to all of them."""
        index = self._running
        self._check_place(index, place)
        self._arrived.append(value)
        if len(self._arrived) == len(self.forwards):
            values, self._arrived = self._arrived, []
            self._pooled = pool(values)
            self._place, following = "", 0
        else:
            self._place, following = place, index + 1
        if following != index:
            self._turns[following].release()
            self._turns[index].acquire()
        self._running = index
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

    def _start(self, thread: Thread) -> None:
        try:
            thread.start()
        except RuntimeError as error:  # not retried, because smaller micro-batches would need more threads
            raise MemoryLimitError(
                f"{error}: batch_norm='exact' runs each of {len(self.forwards)} micro-batches in a thread of its own, and the "
                "system allows no more of them, by number (ulimit -u), or by the memory that their stacks may take (ulimit -v, "
                "-d; each takes ulimit -s). Use larger micro-batches, or raise the limit."
            ) from error

    def _work(self, index: int, in_state: Callable[[Callable[[], T]], T]) -> None:
        self._turns[index].acquire()
        self._running = index
        try:
            if not self._is_abandoned:
                result = in_state(self.forwards[index])
                if self._arrived:
                    raise LockstepError(
                        f"micro-batch {self.numbers[index]} finished its forward without meeting {self._place}, at which "
                        f"micro-batch {self.numbers[0]} waits. {_RULE}"
                    )
                self._results[index] = result
        except _Abandoned:
            pass
        except BaseException as error:  # raised again in the caller's thread
            self._error = self._error or error
            self._is_abandoned = True
        self._ended.append(index)
        if self.is_over:
            self._all_ended.release()
        else:
            # after a failure, waiting forwards unwind one after the other
            waiting = [other for other in range(len(self.forwards)) if other not in self._ended]
            self._turns[next((other for other in waiting if other > index), waiting[0])].release()


def _thread_state() -> Callable[[Callable[[], T]], T]:
    """Return a function that runs work in another thread as if it ran in this one.

    It copies grad mode, autocast, function and dispatch modes, number of intra-op threads, current device and stream.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device_types = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    enabled = [device_type for device_type in device_types if torch.is_autocast_enabled(device_type)]
    autocasts = [(device_type, torch.get_autocast_dtype(device_type)) for device_type in enabled]
    is_cached, is_grad_enabled = torch.is_autocast_cache_enabled(), torch.is_grad_enabled()
    modes = [*function_mode_stack(), *dispatch_mode_stack()]
    num_threads = torch.get_num_threads()
    device_index = None if accelerator is None else torch.accelerator.current_device_index()
    stream = None if accelerator is None else torch.accelerator.current_stream()
    context = contextvars.copy_context()

    def run(work: Callable[[], T]) -> T:
        torch.set_num_threads(num_threads)
        with ExitStack() as stack:
            if device_index is not None and stream is not None:
                torch.accelerator.set_device_index(device_index)
                torch.accelerator.set_stream(stream)
            stack.enter_context(torch.set_grad_enabled(is_grad_enabled))
            for device_type, dtype in autocasts:
                stack.enter_context(torch.autocast(device_type, dtype, cache_enabled=is_cached))
            for mode in modes:
                stack.enter_context(mode)
            return context.copy().run(work)

    return run

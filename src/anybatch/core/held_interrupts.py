"""Ctrl-C that waits until a step is done: amid it, some parameters would be stepped and others not."""

import threading
from signal import SIGINT, getsignal, signal
from types import FrameType, TracebackType


class HeldInterrupts:
    """The block in which SIGINT waits; at its end the handler of before is told. Only the main thread gets signals."""

    __slots__ = ("_before", "_caught")

    def __init__(self) -> None:
        self._before: object = None
        self._caught: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            before = getsignal(SIGINT)
            if callable(before):  # neither ignored, nor the system's own, nor set outside of Python
                self._before = before
                signal(SIGINT, self._catch)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        self._caught = number, frame

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        before, self._before = self._before, None
        if callable(before):
            signal(SIGINT, before)
            caught, self._caught = self._caught, None
            if caught is not None:
                before(*caught)

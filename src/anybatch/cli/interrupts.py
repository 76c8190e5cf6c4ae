"""Ctrl-C, or a terminal that is closed, as a wish to stop after the update that runs, not in the middle of it."""

import signal
import threading
from types import FrameType
from typing import Any


class Interrupts:
    """A block in which the first SIGINT, SIGTERM or SIGHUP only sets `is_wished`; a second SIGINT interrupts as usual.

    A signal that is ignored when the block begins, as `nohup` and shells without a terminal have it, stays ignored.
    """

    def __init__(self) -> None:
        self.is_wished = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():  # Python hands signals to no other
            for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # Windows has no SIGHUP
                number = getattr(signal, name, None)
                if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._take_note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __call__(self) -> bool:
        return self.is_wished

    def _take_note(self, number: int, frame: FrameType | None) -> None:
        if self.is_wished and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.is_wished = True

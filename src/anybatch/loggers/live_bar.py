"""How far a loop has come: a bar in a notebook, a line on a terminal."""

import sys
import time
from collections.abc import Callable
from html import escape
from typing import Any

from anybatch.update import UpdateResult

EVERY = 0.2
"""Seconds between two looks: reading the loss waits for the device."""


class ProgressBar:
    """Shows how many of `total` updates are done, the loss, the rate and the time left.

    In a notebook it is one bar that moves, on a terminal one line; where neither looks, nothing is written and nothing read.
    """

    def __init__(self, total: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.total = total
        self.updates = 0
        self._clock = clock
        self._begin = clock()
        self._shown = self._begin - EVERY
        self._bar: Any = None

    def __call__(self, result: UpdateResult) -> None:
        """Count one update, and show it where a fifth of a second has passed, or all are done."""
        self.updates += 1
        now = self._clock()
        if now - self._shown < EVERY and self.updates != self.total:
            return
        self._shown = now
        shell = _notebook()
        if shell is not None:
            self._show_bar(shell, self._text(result, now))
        elif sys.stderr is not None and sys.stderr.isatty():
            end = "\n" if self.updates == self.total else ""
            sys.stderr.write(f"\r\x1b[K{self._text(result, now)}{end}")
            sys.stderr.flush()

    def _text(self, result: UpdateResult, now: float) -> str:
        rate = self.updates / max(now - self._begin, 1e-9)
        left = f"{(self.total - self.updates) / rate:.0f} s left" if self.updates < self.total else "done"
        return f"update {self.updates} of {self.total}, loss {float(result.loss):.4f}, {rate:.1f}/s, {left}"

    def _show_bar(self, shell: Any, text: str) -> None:
        share = f'value="{self.updates}" max="{self.total}"'
        html = f'<progress {share} aria-label="updates" style="width:20em"></progress> {escape(text)}'
        if self._bar is None:
            self._bar = shell.display.display(shell.display.HTML(html), display_id=True)
        else:
            self._bar.update(shell.display.HTML(html))


def _notebook() -> Any:
    """IPython, where this runs in the kernel of a notebook; nothing is loaded to find out."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return ipython if shell is not None and hasattr(shell, "kernel") else None

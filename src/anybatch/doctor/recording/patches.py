"""Functions of torch replaced while a doctor watches, and put back."""

from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any


class Patches:
    """What was replaced, with what was there."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any, bool]] = []
        self.handles: list[Any] = []

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """`owner.name` becomes `make(what it was)`."""
        original = getattr(owner, name)
        is_own = name in vars(owner)
        replacement = make(original)
        with suppress(AttributeError):
            replacement = wraps(original)(replacement)
        replacement.is_doctors = True
        self._before.append((owner, name, vars(owner).get(name), is_own))
        setattr(owner, name, replacement)

    def undo(self) -> None:
        """Everything as it was."""
        for owner, name, original, is_own in reversed(self._before):
            if is_own:
                setattr(owner, name, original)
            else:
                delattr(owner, name)
        for handle in self.handles:
            handle.remove()
        self._before, self.handles = [], []


def around(before: Callable[..., Any], after: Callable[..., Any]) -> Callable[[Any], Any]:
    """A replacement that calls `before(*arguments)` and `after(result, *arguments)` around the original."""

    def make(original: Any) -> Any:
        def replaced(*arguments: Any, **named: Any) -> Any:
            before(*arguments, **named)
            result = original(*arguments, **named)
            after(result, *arguments, **named)
            return result

        return replaced

    return make


def nothing(*_: Any, **__: Any) -> None:
    """For one side of `around`."""

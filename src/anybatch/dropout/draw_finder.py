"""Finding who draws random numbers: the first torch function after which a generator has moved."""

import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from anybatch.core import random_state, without_dynamo

_TORCH = str(Path(torch.__file__).parent)
_OWN = str(Path(__file__).parent)


class DrawFinder(TorchFunctionMode):
    """Watches every torch function in its block; slow, for a block that runs once."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        super().__init__()
        self._devices = tuple(devices)
        self.found: str | None = None
        """The function and where it was called; None while nobody drew."""

    @without_dynamo
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        before = random_state(self._devices) if self.found is None else None
        result = func(*args, **(kwargs or {}))
        if before is not None and not before.is_now():
            self.found = f"{getattr(func, '__name__', func)} {_caller()}"
        return result


def _caller() -> str:
    """The innermost line that is neither torch's nor ours."""
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith((_TORCH, _OWN)):
            return f"in {frame.name}, {Path(frame.filename).name}:{frame.lineno}"
    return "somewhere in torch"

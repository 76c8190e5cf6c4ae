"""Telling the stages of an update to whoever listens: an observer, or a running profiler; and to nobody, for nothing."""

from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any, Protocol

from torch import Tensor, nn
from torch.autograd.profiler import record_function

from anybatch.core.boundary import ForwardBoundary
from anybatch.core.events import Event, Loss, Observer
from anybatch.core.torch_private import is_profiled


class Events(Protocol):
    """What the engine tells of: each stage is begun, and ended with its facts."""

    def begin(self, kind: type[Event]) -> None:
        """Open a stage; a stage that was left open is closed without an event."""

    def end(self, kind: type[Event], **facts: Any) -> None:
        """Close the open stage and tell what happened in it."""

    def end_loss(self, loss: Tensor, *, micro_batch: int | None, units: float, share: float) -> None:
        """Close the stage in which a loss was made; it is told without its graph."""

    def forward(self, model: nn.Module, micro_batch: int) -> AbstractContextManager[object]:
        """The block in which an objective calls the model: what follows the last call is the stage of the loss."""

    def close(self) -> None:
        """Close the open stage, if any, without an event: what an exception leaves to do."""


class Silent:
    """Nobody listens."""

    _nothing = nullcontext()

    def begin(self, kind: type[Event]) -> None:
        pass

    def end(self, kind: type[Event], **facts: Any) -> None:
        pass

    def end_loss(self, loss: Tensor, *, micro_batch: int | None, units: float, share: float) -> None:
        pass

    def forward(self, model: nn.Module, micro_batch: int) -> AbstractContextManager[object]:
        return self._nothing

    def close(self) -> None:
        pass


SILENT = Silent()


class Heard:
    """Times the stages, names them to the profiler as `anybatch.load`, `anybatch.forward` and so on, and tells the observer."""

    def __init__(self, observer: Observer | None) -> None:
        self._observer = observer
        self._range: record_function | None = None
        self._started = 0.0
        self.stage = ""

    def begin(self, kind: type[Event]) -> None:
        self.close()
        self.stage = kind.stage
        self._range = record_function(f"anybatch.{kind.stage}")
        self._range.__enter__()
        self._started = perf_counter()

    def end(self, kind: type[Event], **facts: Any) -> None:
        seconds = perf_counter() - self._started
        self.close()
        if self._observer is not None:
            self._observer(kind(started=self._started, seconds=seconds, **facts))

    def end_loss(self, loss: Tensor, *, micro_batch: int | None, units: float, share: float) -> None:
        self.end(Loss, micro_batch=micro_batch, loss=loss.detach(), units=units, share=share)

    def forward(self, model: nn.Module, micro_batch: int) -> AbstractContextManager[object]:
        return ForwardBoundary(self, model, micro_batch)

    def close(self) -> None:
        self.stage = ""
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None


def events_for(observer: Observer | None) -> Events:
    """Events that are heard if anybody listens, an observer or a running profiler; else silent ones."""
    return SILENT if observer is None and not is_profiled() else Heard(observer)

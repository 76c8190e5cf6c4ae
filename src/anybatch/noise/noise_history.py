"""Which updates are measured, and what those that were say together."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import nn

from anybatch.noise.noise_scale import FEWEST_WINDOWS, NoiseScale, WindowNoise, noise_scale_of
from anybatch.noise.pass_norms import UNMEASURED, NormSums, NotMeasured, PassMeter, PassNorms, Refused

MOST_WINDOWS = 100
"""Older ones are forgotten, because the noise scale grows while a model learns."""


class NoiseRecord(Protocol):
    """What an `Update` knows of the noise of its gradients."""

    @property
    def scale(self) -> NoiseScale | None:
        """From the latest windows; None where there is a `reason`."""

    @property
    def reason(self) -> str | None:
        """Why there is no noise scale."""

    def meter(self, reason: str = "") -> PassMeter:
        """Who looks at the next batch. `reason` says why nobody could."""

    def add(self, found: NormSums | NotMeasured, norm: Any, *, applied: bool) -> None:
        """One more update is over; `norm` is that of its gradient."""

    def state_dict(self) -> dict[str, Any] | None:
        """What a checkpoint holds of it."""

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Go on from there."""


class NotAsked:
    """Nobody asked."""

    scale = None
    reason = "not measured: Update(..., noise=8) measures one update in 8"

    def meter(self, reason: str = "") -> PassMeter:
        return UNMEASURED

    def add(self, found: NormSums | NotMeasured, norm: Any, *, applied: bool) -> None:
        pass

    def state_dict(self) -> dict[str, Any] | None:
        return None

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        pass


NOT_ASKED = NotAsked()


class NoiseHistory:
    """One update in `every` is measured, beginning with the first: the gradients of `parameters()`."""

    def __init__(self, every: int, parameters: Callable[[], Sequence[nn.Parameter]]) -> None:
        self._every = every
        self._parameters = parameters
        self._num_updates = 0
        self.windows: deque[WindowNoise] = deque(maxlen=MOST_WINDOWS)
        self._reason = ""
        self.scale: NoiseScale | None = None

    @property
    def reason(self) -> str | None:
        count = len(self.windows)
        if count >= FEWEST_WINDOWS:
            return None
        return self._reason or f"{count} of {FEWEST_WINDOWS} windows are measured, one update in {self._every}"

    def meter(self, reason: str = "") -> PassMeter:
        if self._num_updates % self._every:
            return UNMEASURED
        return Refused(reason) if reason else PassNorms(self._parameters())

    def add(self, found: NormSums | NotMeasured, norm: Any, *, applied: bool) -> None:
        self._num_updates += 1
        if isinstance(found, NotMeasured):
            self._reason = found.reason or self._reason
        elif applied:
            self.windows.append(found.window(float(norm)))
            self._reason = ""
            self._estimate()

    def state_dict(self) -> dict[str, Any] | None:
        windows = [(one.row_noise, one.signal) for one in self.windows]
        return {"updates": self._num_updates, "windows": windows}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """A checkpoint of a run that was not measured has nothing to go on from."""
        if state is not None:
            self._num_updates = state["updates"]
            self.windows = deque((WindowNoise(*one) for one in state["windows"]), maxlen=MOST_WINDOWS)
            self._estimate()

    def _estimate(self) -> None:
        self.scale = noise_scale_of(self.windows) if len(self.windows) >= FEWEST_WINDOWS else None


def noise_record(every: int | None, parameters: Callable[[], Sequence[nn.Parameter]]) -> NoiseRecord:
    """What is kept where one update in `every` is measured; nothing, where none is."""
    return NOT_ASKED if every is None else NoiseHistory(every, parameters)

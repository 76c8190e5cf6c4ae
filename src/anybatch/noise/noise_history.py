"""Which updates are measured, and what those that were say together."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from anybatch.noise.noise_scale import FEWEST_WINDOWS, NoiseScale, WindowNoise, noise_scale_of
from anybatch.noise.pass_norms import ONE_MICRO_BATCH, NotMeasured, PassNorms

MOST_WINDOWS = 100
"""Older ones are forgotten, because the noise scale grows while a model learns."""


class NoiseHistory:
    """One update in `every` is measured, beginning with the first: the gradients of `parameters()`."""

    def __init__(self, every: int, parameters: Callable[[], Sequence[nn.Parameter]]) -> None:
        self._every = every
        self._parameters = parameters
        self._num_updates = 0
        self.windows: deque[WindowNoise] = deque(maxlen=MOST_WINDOWS)
        self._reason = ""
        self.scale: NoiseScale | None = None
        self._hook: PassNorms | None = None
        self._refusal = ""

    @property
    def reason(self) -> str | None:
        count = len(self.windows)
        if count >= FEWEST_WINDOWS:
            return None
        return self._reason or f"{count} of {FEWEST_WINDOWS} windows are measured, one update in {self._every}"

    @property
    def is_due(self) -> bool:
        """True if the next update is one to be measured."""
        return self._num_updates % self._every == 0

    def hook(self, *, hides_parts: str, is_sharded: bool, num_micro_batches: int) -> PassNorms | None:
        """Give the hook that measures the next batch; None where it is not due, or why not is noted as the reason."""
        self._hook, self._refusal = None, ""
        if not self.is_due:
            return None
        if is_sharded and not hides_parts:
            hides_parts = (
                "a model sharded by fully_shard adds gradients up inside FSDP2, and no micro-batch's own is seen"
            )
        self._refusal = hides_parts or (ONE_MICRO_BATCH if num_micro_batches == 1 else "")
        self._hook = None if self._refusal else PassNorms(self._parameters())
        return self._hook

    def add(self, norm: Any, *, applied: bool) -> None:
        """Count one more update; `norm` is that of its gradient."""
        found = NotMeasured(self._refusal) if self._hook is None else self._hook.found
        self._hook, self._refusal = None, ""
        self._num_updates += 1
        if isinstance(found, NotMeasured):
            self._reason = found.reason or self._reason
        elif applied:
            self.windows.append(found.window(float(norm)))
            self._reason = ""
            self._estimate()

    def state_dict(self) -> dict[str, Any]:
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

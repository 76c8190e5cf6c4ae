"""How BatchNorm layers see a batch that is cut: exact, by micro-batch, or frozen; and the warning where nobody chose."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

from torch import nn

from anybatch.batch_norm.layers import Layers, batch_norms, instance_norms, uses_batch_statistics
from anybatch.batch_norm.spectral import Rewound, spectral_norms
from anybatch.batch_norm.statistics import Frozen, Merged, frozen
from anybatch.core import BatchNorm, MicroBatches, NormLayer, PassHook, Ranks
from anybatch.errors import user_stacklevel


class NormPolicy:
    """How the BatchNorm layers of one model see a batch that is cut; None is `"micro"` with one warning.

    InstanceNorm's running statistics and the power iterations of spectral norm advance once per batch, whatever the mode.
    """

    def __init__(self, model: nn.Module, mode: BatchNorm | None, *, is_told: bool = False) -> None:
        self.mode = mode
        self.is_told = is_told or mode is not None
        self._layers = batch_norms(model)
        self._instances = instance_norms(model)
        self._spectral = spectral_norms(model)

    @property
    def is_needed(self) -> bool:
        """True if the model has a layer that this is about."""
        return bool(self._layers or self._instances or self._spectral)

    def knows(self, module: nn.Module, buffer: str) -> bool:
        """True of a buffer that advances once per batch."""
        return isinstance(module, NormLayer) or any((module, buffer) in layer.slots for layer in self._spectral)

    def touched(self, *, is_cut: bool) -> Layers:
        """Return the BatchNorm layers whose statistics the cut touches: none where the batch is one micro-batch."""
        if not self._layers or (not is_cut and self.mode != "frozen"):
            return {}
        return {name: layer for name, layer in self._layers.items() if uses_batch_statistics(layer)}

    def averaging(self, *, is_cut: bool) -> Layers:
        """Return the InstanceNorm layers whose running statistics the cut touches."""
        return {name: layer for name, layer in self._instances.items() if layer.training} if is_cut else {}

    def hooks(
        self, layers: Layers, averaging: Layers, ranks: Ranks, meet: Callable[[], None], *, is_cut: bool
    ) -> Iterator[PassHook]:
        """Give the hooks of a batch whose cut touches these layers; `meet` is called before ranks exchange statistics."""
        if self.mode != "frozen" and (layers or averaging):
            yield Merged({**layers, **averaging}, ranks, meet)
        elif averaging:
            yield Merged(averaging, ranks, meet, resting=layers)
        elif layers:
            yield Frozen(layers)
        if self._spectral and is_cut:
            yield Rewound(self._spectral)

    def alone(self) -> AbstractContextManager[object]:
        """Let one micro-batch run by itself, to be looked at; a single row has no statistics of its own."""
        has_running = {name: layer for name, layer in self._layers.items() if layer.running_mean is not None}
        return nullcontext() if self.mode in (None, "micro") else frozen(has_running)

    def warn_once(self, layers: Layers, cut: MicroBatches, num_micro_batches: int) -> None:
        """Warn that each micro-batch has statistics of its own, where nobody chose this."""
        if self.is_told or not layers:
            return
        self.is_told = True
        most = max(len(rows) for rows in cut.row_numbers)
        warnings.warn(
            f"{len(layers)} BatchNorm layers in training mode see this batch as {num_micro_batches} micro-batches of at most "
            f"{most} rows, each with its own statistics, so its gradient is not the whole batch's. verify(model, objective, "
            "batch) measures how far off it is. Use batch_norm='exact' for the whole batch's gradient, or batch_norm='micro' "
            "to keep this without the warning.",
            stacklevel=user_stacklevel(),
        )

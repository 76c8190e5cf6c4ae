"""Modes of norm layers for a batch that is split: exact, by micro-batch, or frozen."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from torch import nn

from anybatch.batch_norm.layers import Layers, batch_norms, uses_batch_statistics
from anybatch.batch_norm.spectral import Rewound, spectral_norms
from anybatch.batch_norm.statistics import Frozen, Merged, frozen
from anybatch.core import NOTHING, BatchNorm, InstanceNormLayer, MicroBatches, NormLayer, PassHook, Ranks
from anybatch.errors import user_stacklevel


class NormPolicy:
    """The norm layers of one model and their mode; None is `"micro"` with one warning.

    Running statistics of InstanceNorm and power iterations of spectral norm advance once per batch in every mode.
    """

    def __init__(self, model: nn.Module, mode: BatchNorm | None, *, is_told: bool = False) -> None:
        self.mode = mode
        self.is_told = is_told or mode is not None
        """True if the user chose a mode or was warned."""
        self._layers = batch_norms(model)
        instances = {name: one for name, one in model.named_modules() if isinstance(one, InstanceNormLayer)}
        self._instances = {name: layer for name, layer in instances.items() if layer.track_running_stats}
        self._spectral = spectral_norms(model)

    @property
    def is_needed(self) -> bool:
        return bool(self._layers or self._instances or self._spectral)

    def knows(self, module: nn.Module, buffer: str) -> bool:
        """True for a buffer that advances once per batch."""
        return isinstance(module, NormLayer) or any((module, buffer) in layer.slots for layer in self._spectral)

    def touched(self, *, is_cut: bool) -> Layers:
        """Return the BatchNorm layers with statistics that depend on the split; none for one micro-batch."""
        if not is_cut and self.mode != "frozen":
            return {}
        return {name: layer for name, layer in self._layers.items() if uses_batch_statistics(layer)}

    def averaging(self, *, is_cut: bool) -> Layers:
        """Return the InstanceNorm layers with running statistics that depend on the split."""
        return {name: layer for name, layer in self._instances.items() if layer.training} if is_cut else {}

    def hooks(
        self, layers: Layers, averaging: Layers, ranks: Ranks, meet: Callable[[], None], *, is_cut: bool
    ) -> Iterator[PassHook]:
        """Yield the hooks of a batch; `layers` and `averaging` are those that `touched` and `averaging` returned."""
        is_frozen = self.mode == "frozen"
        if is_frozen and layers:
            yield Frozen(layers)
        merged = averaging if is_frozen else {**layers, **averaging}
        if merged:
            yield Merged(merged, ranks, meet)
        if self._spectral and is_cut:
            yield Rewound(self._spectral)

    def alone(self) -> AbstractContextManager[object]:
        """Surround the forward of a single micro-batch; one row has no statistics of its own."""
        has_running = {name: layer for name, layer in self._layers.items() if layer.running_mean is not None}
        return NOTHING if self.mode in (None, "micro") else frozen(has_running)

    def warn_once(self, layers: Layers, cut: MicroBatches, num_micro_batches: int) -> None:
        """Warn that each micro-batch has its own statistics, unless the user chose a mode."""
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

"""What BatchNorm does when a batch is cut: exact, by micro-batch, or frozen; and the warning where nobody chose."""

import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from torch import nn

from anybatch.batches import MicroBatches
from anybatch.norms.layers import Layers, batch_norms, uses_batch_statistics
from anybatch.norms.statistics import AS_IS, Frozen, Merged, Statistics, frozen
from anybatch.options import BatchNorm
from anybatch.parallel import Ranks


class NormPolicy:
    """How the BatchNorm layers of one model see a batch that is cut; None is `"micro"` with one warning."""

    def __init__(self, model: nn.Module, mode: BatchNorm | None) -> None:
        self.mode = mode
        self._layers = batch_norms(model)
        self._is_told = mode is not None

    def touched(self, *, is_cut: bool) -> Layers:
        """The layers whose statistics the cut touches: none where the batch is one micro-batch, or the model has none."""
        if not self._layers or (not is_cut and self.mode != "frozen"):
            return {}
        return {name: layer for name, layer in self._layers.items() if uses_batch_statistics(layer)}

    def statistics(self, layers: Layers, ranks: Ranks, meet: Callable[[], None]) -> Statistics:
        """What these layers do while micro-batches run one by one; `meet` is called before ranks exchange statistics."""
        if not layers:
            return AS_IS
        return Frozen(layers) if self.mode == "frozen" else Merged(layers, ranks, meet)

    def alone(self) -> AbstractContextManager[object]:
        """The block in which one micro-batch can run by itself, to be looked at; a single row has no statistics of its own."""
        has_running = {name: layer for name, layer in self._layers.items() if layer.running_mean is not None}
        return nullcontext() if self.mode in (None, "micro") else frozen(has_running)

    def warn_once(self, layers: Layers, cut: MicroBatches, num_micro_batches: int) -> None:
        """Say what nobody chose: that each micro-batch has statistics of its own."""
        if self._is_told or not layers:
            return
        self._is_told = True
        most = max(len(rows) for rows in cut.row_numbers)
        warnings.warn(
            f"{len(layers)} BatchNorm layers in training mode see this batch as {num_micro_batches} micro-batches of at most "
            f"{most} rows, each with its own statistics, so its gradient is not the whole batch's. verify(model, objective, "
            "batch) measures how far off it is. Use batch_norm='exact' for the whole batch's gradient, or batch_norm='micro' "
            "to keep this without the warning.",
            stacklevel=_levels_to_the_caller(),
        )


def _levels_to_the_caller() -> int:
    """How far up the first line is that is not ours: whose update it is."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and Path(frame.f_code.co_filename).is_relative_to(_OWN):
        level, frame = level + 1, frame.f_back
    return level


_OWN = Path(__file__).parents[1]

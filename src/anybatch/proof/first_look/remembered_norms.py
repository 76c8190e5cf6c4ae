"""BatchNorm layers that normalise any rows by what they saw of all of them."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch.norms import Call, Layers, batch_norms, replaced, uses_batch_statistics
from anybatch.torch_inside import NormLayer


@dataclass(slots=True)
class RememberedNorms:
    """The statistics of a first forward, layer by layer and call by call, for the later ones to use.

    So the rows of a batch are judged as `batch_norm="exact"` has them, and whatever else couples them is seen; running
    statistics do not move.
    """

    layers: Layers
    _statistics: dict[str, list[tuple[Tensor, Tensor]]] = field(default_factory=lambda: defaultdict(list))

    @contextmanager
    def first(self) -> Iterator[None]:
        """The forward whose statistics are kept."""
        self._statistics.clear()

        def compute(name: str, layer: NormLayer, call: Call) -> Tensor:
            dims = [dim for dim in range(call.input.dim()) if dim != 1]
            var, mean = torch.var_mean(
                call.input.float() if call.input.itemsize < 4 else call.input, dims, correction=0
            )
            self._statistics[name].append((mean, var))
            return _normalised(call, mean, var)

        with replaced(self.layers, compute):
            yield

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """A forward that normalises by the running statistics."""

        def compute(name: str, layer: NormLayer, call: Call) -> Tensor:
            assert call.running_mean is not None
            assert call.running_var is not None
            return _normalised(call, call.running_mean, call.running_var)

        with replaced(self.layers, compute):
            yield

    @contextmanager
    def later(self) -> Iterator[None]:
        """A forward of some of those rows."""
        left = {name: iter(kept) for name, kept in self._statistics.items()}

        def compute(name: str, layer: NormLayer, call: Call) -> Tensor:
            return _normalised(call, *next(left[name]))

        with replaced(self.layers, compute):
            yield


def remembered_norms(model: nn.Module) -> RememberedNorms:
    """Those of this model, for the layers that look at the batch."""
    return RememberedNorms({name: layer for name, layer in batch_norms(model).items() if uses_batch_statistics(layer)})


def _normalised(call: Call, mean: Tensor, var: Tensor) -> Tensor:
    like = next(held for held in (call.running_mean, call.weight, call.input) if held is not None)
    mean, var = mean.to(like.dtype), var.to(like.dtype)
    return F.batch_norm(call.input, mean, var, call.weight, call.bias, False, 0.0, call.eps)

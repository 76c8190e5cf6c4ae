"""Statistics of norm layers: pooling, and hooks for micro-batches that run one by one (frozen or merged)."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from anybatch.batch_norm.layers import Call, Layers, replaced
from anybatch.core import BatchNormLayer, NormLayer, PassHook, Ranks, tensor_on
from anybatch.errors import BatchError, UpdateError


@dataclass(frozen=True, slots=True)
class MeanAndVariance:
    """Mean and biased variance per channel of `count` values."""

    count: int
    mean: Tensor
    var: Tensor
    momentum: float
    """Weight of these statistics in the layer's running ones."""
    is_averaged: bool = False
    """True for InstanceNorm: means over `count` rows of each row's own mean and unbiased variance."""


def own_statistics(call: Call) -> tuple[Tensor, MeanAndVariance]:
    """Normalise by the statistics of this call's input; return the output and them. Running statistics do not change."""
    assert call.running_mean is not None
    assert call.running_var is not None
    mean, var = torch.zeros_like(call.running_mean), torch.zeros_like(call.running_var)
    output = call.with_running(mean, var, 1.0)  # momentum 1 writes the statistics themselves
    biased = var if call.is_averaged else var * ((call.count - 1) / call.count)
    return output, MeanAndVariance(call.count, mean, biased, call.momentum, call.is_averaged)


def pool(parts: list[MeanAndVariance]) -> MeanAndVariance:
    """Pool the statistics of all values by Chan's formula; differentiable.

        mean = sum n_k mean_k / n,   var = sum n_k (var_k + (mean_k - mean)^2) / n

    For InstanceNorm the variance is the mean of variances.
    """
    total = sum(part.count for part in parts)
    if total == 0:
        return parts[0]
    means, variances = torch.stack([part.mean for part in parts]), torch.stack([part.var for part in parts])
    weights = tensor_on([part.count / total for part in parts], means.device, means.dtype)[:, None]
    mean = (weights * means).sum(0)
    is_averaged = parts[0].is_averaged
    var = (weights * (variances if is_averaged else variances + (means - mean).square())).sum(0)
    return MeanAndVariance(total, mean, var, parts[0].momentum, is_averaged)


def of_every_rank(ranks: Ranks, own: list[MeanAndVariance]) -> list[list[MeanAndVariance]]:
    """Gather the statistics of the same layers by rank: one collective for all layers, without a graph."""
    flat = [torch.cat([m.mean.new_tensor([m.count]), m.mean, m.var]).detach().double() for m in own]
    every = ranks.all_rows(torch.cat(flat)[None], [1] * ranks.size)
    sizes = [len(piece) for piece in flat]
    return [[_unpacked(piece, like) for piece, like in zip(row.split(sizes), own, strict=True)] for row in every]


def _unpacked(piece: Tensor, like: MeanAndVariance) -> MeanAndVariance:
    mean, var = piece[1:].to(like.mean.dtype).chunk(2)
    return MeanAndVariance(int(piece[0]), mean, var, like.momentum, like.is_averaged)


def pool_over_ranks(ranks: Ranks, own: list[MeanAndVariance]) -> list[MeanAndVariance]:
    """Pool the statistics of each layer over all ranks, with the same result on every rank."""
    if ranks.size == 1 or not own:
        return own
    return [pool(list(column)) for column in zip(*of_every_rank(ranks, own), strict=True)]


@torch.no_grad()
def update_running(call: Call, statistics: MeanAndVariance) -> None:
    """Update the running statistics once, with the unbiased variance, as torch does."""
    bias = 1.0 if statistics.is_averaged else statistics.count / max(statistics.count - 1, 1)
    unbiased = statistics.var * bias
    for running, value in ((call.running_mean, statistics.mean), (call.running_var, unbiased)):
        if running is not None:
            running.lerp_(value.to(running.dtype), statistics.momentum)


class Frozen(PassHook):
    """BatchNorm layers normalise by their running statistics and do not change them, as in eval mode."""

    def __init__(self, layers: Layers) -> None:
        self._layers = layers

    def around_batch(self) -> AbstractContextManager[object]:
        return frozen(self._layers)


@contextmanager
def frozen(layers: Layers) -> Iterator[None]:
    for name, layer in layers.items():
        if layer.running_mean is None:
            raise UpdateError(
                f"batch_norm='frozen': BatchNorm {name!r} keeps no running statistics (track_running_stats=False) to normalise "
                "by. Use batch_norm='exact' or 'micro', or make the layer with track_running_stats=True."
            )
    was_training = [(layer, layer.training) for layer in layers.values()]
    try:
        for layer in layers.values():
            layer.training = False
        yield
    finally:
        for layer, is_training in was_training:
            layer.training = is_training


class Merged(PassHook):
    """Each micro-batch is normalised by itself; after the batch, running statistics get one update from all of them.

    The update uses the activations as they were in each micro-batch, those without targets included. For InstanceNorm it is
    exact, because each row is normalised by itself. An error leaves running statistics unchanged. `meet` is called before
    ranks exchange statistics.
    """

    needs_all_rows = True

    def __init__(self, layers: Layers, ranks: Ranks, meet: Callable[[], None]) -> None:
        self._layers = layers
        self._ranks = ranks
        self._meet = meet
        self._num_tracked: dict[str, Tensor] = {}
        self._num_calls: dict[str, int] = {}
        self._current: list[tuple[tuple[str, int], Call, MeanAndVariance]] = []
        self._seen: dict[tuple[str, int], tuple[Call, list[MeanAndVariance]]] = {}

    @contextmanager
    def around_counted(self) -> Iterator[None]:
        counting = {name: layer for name, layer in self._layers.items() if isinstance(layer, BatchNormLayer)}
        tracked = {name: layer.num_batches_tracked for name, layer in counting.items()}
        self._num_tracked = {name: number.clone() for name, number in tracked.items() if number is not None}
        self._num_calls, self._current, self._seen = {}, [], {}
        try:
            with replaced(self._layers, self._compute):
                yield
            self._meet()  # ranks pool their statistics only if all of them reach this line
        finally:
            self.before_pass()
        self._update()

    def before_pass(self) -> None:
        """Keep the statistics of the last micro-batch, and count the calls of each layer from 0 again."""
        for key, call, own in self._current:
            self._seen.setdefault(key, (call, []))[1].append(own)
        self._current.clear()
        self._num_calls.clear()
        for name, number in self._num_tracked.items():
            self._layers[name].num_batches_tracked.copy_(number)  # type: ignore[union-attr]

    def discard_pass(self) -> None:
        for key, call, _ in self._current:
            self._seen.setdefault(key, (call, []))
        self._current.clear()

    def _compute(self, name: str, layer: NormLayer, call: Call) -> Tensor:
        if call.count == 1 and not call.is_averaged:
            raise BatchError(
                f"BatchNorm {name!r} got one value per channel (input of shape {tuple(call.input.shape)}): it has no variance. "
                "Use batch_norm='exact', whose statistics are the whole batch's, or larger micro-batches."
            )
        if call.running_mean is None or call.running_var is None:
            return call.as_asked()
        output, own = own_statistics(call)
        number = self._num_calls[name] = self._num_calls.get(name, -1) + 1
        running = type(call)(own.mean[:0], call.running_mean, call.running_var)
        self._current.append(((name, number), running, own))
        return output

    def _update(self) -> None:
        """Update the running statistics of each layer once, or once per call if the forward calls it more than once."""
        calls = sorted(self._seen.items(), key=lambda item: (item[0][1], item[0][0]))
        own = [pool(parts) if parts else _nothing(call) for _, (call, parts) in calls]
        for ((name, number), (call, _)), pooled in zip(calls, pool_over_ranks(self._ranks, own), strict=True):
            if pooled.count == 0:
                continue
            update_running(call, pooled)
            if name in self._num_tracked and self._layers[name].training:
                self._layers[name].num_batches_tracked.copy_(self._num_tracked[name] + number + 1)  # type: ignore[union-attr]


def _nothing(call: Call) -> MeanAndVariance:
    """Return the statistics of no values."""
    assert call.running_mean is not None
    assert call.running_var is not None
    empty = torch.zeros_like(call.running_mean), torch.ones_like(call.running_var)
    return MeanAndVariance(0, *empty, call.momentum, call.is_averaged)

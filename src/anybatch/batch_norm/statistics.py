"""Statistics of BatchNorm layers where micro-batches run one by one: frozen, or merged into the running ones."""

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
    """Mean and biased variance per channel of some values, and how many they were."""

    count: int
    mean: Tensor
    var: Tensor
    momentum: float
    """Weight of these statistics in the layer's running ones."""
    is_averaged: bool = False
    """True of InstanceNorm: means over `count` rows of each row's own mean and unbiased variance."""


def pool(parts: list[MeanAndVariance]) -> MeanAndVariance:
    """Pool the statistics of all values (Chan's formula); autograd sees through it.

    mean = sum n_k mean_k / n,   var = sum n_k (var_k + (mean_k - mean)^2) / n

    Of rows that each have their own statistics, the variance is the mean of variances.
    """
    total = sum(part.count for part in parts)
    means, variances = torch.stack([part.mean for part in parts]), torch.stack([part.var for part in parts])
    weights = tensor_on([part.count / total for part in parts], means.device, means.dtype)[:, None]
    mean = (weights * means).sum(0)
    is_averaged = parts[0].is_averaged
    var = (weights * (variances if is_averaged else variances + (means - mean).square())).sum(0)
    return MeanAndVariance(total, mean, var, parts[0].momentum, is_averaged)


def nothing(call: Call) -> MeanAndVariance:
    """Return the statistics of no values, for a layer's running statistics."""
    assert call.running_mean is not None
    assert call.running_var is not None
    nought = torch.zeros_like(call.running_mean), torch.ones_like(call.running_var)
    return MeanAndVariance(0, *nought, call.momentum, call.is_averaged)


def of_every_rank(ranks: Ranks, own: list[MeanAndVariance]) -> list[list[MeanAndVariance]]:
    """Gather the statistics of the same layers by rank: one collective for all layers, and no graph."""
    flat = [torch.cat([m.mean.new_tensor([m.count]), m.mean, m.var]).detach().double() for m in own]
    every = ranks.all_rows(torch.cat(flat)[None], [1] * ranks.size)
    sizes = [len(piece) for piece in flat]
    return [[_unpacked(piece, like) for piece, like in zip(told.split(sizes), own, strict=True)] for told in every]


def _unpacked(piece: Tensor, like: MeanAndVariance) -> MeanAndVariance:
    mean, var = piece[1:].to(like.mean.dtype).chunk(2)
    return MeanAndVariance(int(piece[0]), mean, var, like.momentum, like.is_averaged)


def pool_over_ranks(ranks: Ranks, own: list[MeanAndVariance]) -> list[MeanAndVariance]:
    """Pool the statistics of each layer over all ranks, the same on every rank."""
    if ranks.size == 1 or not own:
        return own
    columns = zip(*of_every_rank(ranks, own), strict=True)
    return [pool(list(column)) if any(part.count for part in column) else column[0] for column in columns]


@torch.no_grad()
def update_running(call: Call, statistics: MeanAndVariance) -> None:
    """Update the running statistics once, with the unbiased variance, as torch does."""
    bias = 1.0 if statistics.is_averaged else statistics.count / max(statistics.count - 1, 1)
    unbiased = statistics.var * bias
    for running, value in ((call.running_mean, statistics.mean), (call.running_var, unbiased)):
        if running is not None:
            running.lerp_(value.to(running.dtype), statistics.momentum)


class Frozen(PassHook):
    """The layers normalise by their running statistics and leave them alone, as in eval mode."""

    def __init__(self, layers: Layers) -> None:
        self._layers = layers

    def around_batch(self) -> AbstractContextManager[object]:
        return frozen(self._layers)


class Merged(PassHook):
    """Each micro-batch has its own statistics; after the passes that count, the running ones get the big batch's update.

    Merged are mean and variance of the activations as they were, each micro-batch normalised by itself; of InstanceNorm, whose
    rows are normalised each by itself, this is exact. Micro-batches of 0 units have their part. An error leaves running
    statistics as they were. `meet` is called before ranks tell each other theirs. Meanwhile `resting` layers are frozen.
    """

    needs_all_rows = True

    def __init__(self, layers: Layers, ranks: Ranks, meet: Callable[[], None], resting: Layers | None = None) -> None:
        self._layers = layers
        self._resting = resting or {}
        self._ranks = ranks
        self._meet = meet
        self._num_tracked: dict[str, Tensor] = {}
        self._num_calls: dict[str, int] = {}
        self._current: list[tuple[tuple[str, int], Call, MeanAndVariance]] = []
        self._seen: dict[tuple[str, int], tuple[Call, list[MeanAndVariance]]] = {}

    def around_batch(self) -> AbstractContextManager[object]:
        return frozen(self._resting)

    @contextmanager
    def around_counted(self) -> Iterator[None]:
        counting = {name: layer for name, layer in self._layers.items() if isinstance(layer, BatchNormLayer)}
        tracked = {name: layer.num_batches_tracked for name, layer in counting.items()}
        self._num_tracked = {name: number.clone() for name, number in tracked.items() if number is not None}
        self._num_calls, self._current, self._seen = {}, [], {}
        try:
            with replaced(self._layers, self._compute):
                yield
            self._meet()  # ranks pool their statistics only if all of them got here
        except BaseException:
            self.before_pass()
            raise
        self._close()

    def before_pass(self) -> None:
        """Count the last micro-batch, and calls of each layer from 0 again."""
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
        mean, var = torch.zeros_like(call.running_mean), torch.zeros_like(call.running_var)
        output = call.with_running(mean, var, 1.0)  # momentum 1: what is written is this micro-batch's own
        number = self._num_calls[name] = self._num_calls.get(name, -1) + 1
        biased = var if call.is_averaged else var * ((call.count - 1) / call.count)
        own = MeanAndVariance(call.count, mean, biased, call.momentum, call.is_averaged)
        running = type(call)(mean[:0], call.running_mean, call.running_var)
        self._current.append(((name, number), running, own))
        return output

    def _close(self) -> None:
        """Make the one update of each layer, or one per call where the forward calls it more than once."""
        self.before_pass()
        calls = sorted(self._seen.items(), key=lambda item: (item[0][1], item[0][0]))
        own = [pool(parts) if parts else nothing(call) for _, (call, parts) in calls]
        for ((name, number), (call, _)), pooled in zip(calls, pool_over_ranks(self._ranks, own), strict=True):
            if pooled.count == 0:
                continue
            update_running(call, pooled)
            if name in self._num_tracked and self._layers[name].training:
                self._layers[name].num_batches_tracked.copy_(self._num_tracked[name] + number + 1)  # type: ignore[union-attr]


@contextmanager
def frozen(layers: Layers) -> Iterator[None]:
    """Let the layers normalise by their running statistics and leave them alone, as in eval mode."""
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

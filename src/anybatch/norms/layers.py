"""BatchNorm layers whose statistics are not those of the micro-batch that runs: pooled, merged or frozen.

A layer's own `forward` runs as always; only the call of `F.batch_norm` inside it is computed otherwise, for as long as the
block lasts. So subclasses, momentum and counters stay the layer's business.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from anybatch.errors import BatchError, UpdateError
from anybatch.parallel import Ranks

Layers = Mapping[str, _BatchNorm]
"""BatchNorm layers by their names in the model."""


@dataclass(frozen=True, slots=True)
class Call:
    """What a layer asks of `F.batch_norm`, with its names and defaults."""

    input: Tensor
    running_mean: Tensor | None
    running_var: Tensor | None
    weight: Tensor | None = None
    bias: Tensor | None = None
    training: bool = False
    momentum: float = 0.1
    eps: float = 1e-5

    @property
    def count(self) -> int:
        """Values per channel."""
        return self.input.numel() // max(self.input.shape[1], 1)

    def as_asked(self) -> Tensor:
        """What the layer would have computed."""
        return self.with_running(self.running_mean, self.running_var, self.momentum)

    def with_running(self, mean: Tensor | None, var: Tensor | None, momentum: float) -> Tensor:
        """The same computation, with other running statistics to write to."""
        return F.batch_norm(self.input, mean, var, self.weight, self.bias, self.training, momentum, self.eps)


Compute = Callable[[str, _BatchNorm, Call], Tensor]


def batch_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """Every BatchNorm layer of the model, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}


def uses_batch_statistics(layer: _BatchNorm) -> bool:
    """True of a layer whose rows look at each other: in training, or without running statistics to use instead."""
    return layer.training or (layer.running_mean is None and layer.running_var is None)


@contextmanager
def replaced(layers: Layers, compute: Compute) -> Iterator[None]:
    """Inside this block, `compute(name, layer, call)` stands for `F.batch_norm` in the forward of these layers."""
    before: list[tuple[_BatchNorm, Any]] = []
    try:
        for name, layer in layers.items():
            before.append((layer, layer.__dict__.get("forward")))
            # SyncBatchNorm's own forward would talk to other ranks, and refuses the CPU
            own = partial(_BatchNorm.forward, layer) if type(layer) is nn.SyncBatchNorm else layer.forward
            layer.__dict__["forward"] = partial(_forward, own, partial(compute, name, layer))
        yield
    finally:
        for layer, forward in before:
            if forward is None:
                layer.__dict__.pop("forward", None)
            else:
                layer.__dict__["forward"] = forward


def _forward(own: Callable[..., Tensor], compute: Callable[[Call], Tensor], *args: Any, **kwargs: Any) -> Tensor:
    with _Intercept(compute):
        return own(*args, **kwargs)


class _Intercept(TorchFunctionMode):
    """Answers `F.batch_norm` in training by `compute`."""

    def __init__(self, compute: Callable[[Call], Tensor]) -> None:
        super().__init__()
        self._compute = compute

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.batch_norm:
            call = Call(*args, **(kwargs or {}))
            if call.training:
                return self._compute(call)
        return func(*args, **(kwargs or {}))


@contextmanager
def frozen(layers: Layers) -> Iterator[None]:
    """Inside this block the layers normalise by their running statistics and leave them alone, as in eval mode."""
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


@dataclass(frozen=True, slots=True)
class Moments:
    """Mean and biased variance per channel of some values, and how many they were."""

    count: int
    mean: Tensor
    var: Tensor
    momentum: float
    """What the layer weighs these statistics with in its running ones."""


def pool(parts: list[Moments]) -> Moments:
    """The moments of all values together (Chan's formula); autograd sees through it.

    mean = sum n_k mean_k / n,   var = sum n_k (var_k + (mean_k - mean)^2) / n
    """
    total = sum(part.count for part in parts)
    means, variances = torch.stack([part.mean for part in parts]), torch.stack([part.var for part in parts])
    weights = torch.tensor([part.count / total for part in parts], dtype=means.dtype, device=means.device)[:, None]
    mean = (weights * means).sum(0)
    var = (weights * (variances + (means - mean).square())).sum(0)
    return Moments(total, mean, var, parts[0].momentum)


def nothing(call: Call) -> Moments:
    """The moments of no values, for a layer's running statistics."""
    assert call.running_mean is not None
    assert call.running_var is not None
    return Moments(0, torch.zeros_like(call.running_mean), torch.ones_like(call.running_var), call.momentum)


def of_every_rank(ranks: Ranks, own: list[Moments]) -> list[list[Moments]]:
    """The moments of the same layers on each rank, by rank; one collective for all layers, and no graph."""
    flat = [torch.cat([m.mean.new_tensor([m.count]), m.mean, m.var]).detach().double() for m in own]
    every = ranks.all_rows(torch.cat(flat)[None], [1] * ranks.size)
    by_rank = []
    for told in every:
        pieces = told.split([len(piece) for piece in flat])
        by_rank.append([_unpacked(piece, like) for piece, like in zip(pieces, own, strict=True)])
    return by_rank


def _unpacked(piece: Tensor, like: Moments) -> Moments:
    mean, var = piece[1:].to(like.mean.dtype).chunk(2)
    return Moments(int(piece[0]), mean, var, like.momentum)


def pool_over_ranks(ranks: Ranks, own: list[Moments]) -> list[Moments]:
    """The moments of each layer over all ranks, the same on every rank."""
    if ranks.size == 1 or not own:
        return own
    columns = zip(*of_every_rank(ranks, own), strict=True)
    return [pool(list(column)) if any(part.count for part in column) else column[0] for column in columns]


@torch.no_grad()
def update_running(call: Call, moments: Moments) -> None:
    """One big-batch update of the running statistics, with the unbiased variance, as torch makes it."""
    unbiased = moments.var * (moments.count / max(moments.count - 1, 1))
    for running, value in ((call.running_mean, moments.mean), (call.running_var, unbiased)):
        if running is not None:
            running.lerp_(value.to(running.dtype), moments.momentum)


class Merging:
    """Statistics of each micro-batch, collected until they are one update."""

    def __init__(self, layers: Layers, ranks: Ranks) -> None:
        self._layers = layers
        self._ranks = ranks
        self._num_tracked = {
            name: layer.num_batches_tracked.clone()
            for name, layer in layers.items()
            if layer.num_batches_tracked is not None
        }
        self._num_calls: dict[str, int] = {}
        self._current: list[tuple[tuple[str, int], Call, Moments]] = []
        self._seen: dict[tuple[str, int], tuple[Call, list[Moments]]] = {}

    def begin(self) -> None:
        """The next micro-batch starts: the last one counts, and calls of each layer are counted from 0 again."""
        for key, call, moments in self._current:
            self._seen.setdefault(key, (call, []))[1].append(moments)
        self._current.clear()
        self._num_calls.clear()
        for name, number in self._num_tracked.items():
            self._layers[name].num_batches_tracked.copy_(number)  # type: ignore[union-attr]

    def compute(self, name: str, layer: _BatchNorm, call: Call) -> Tensor:
        if call.count == 1:
            raise BatchError(
                f"BatchNorm {name!r} got one value per channel (input of shape {tuple(call.input.shape)}): it has no variance. "
                "Use batch_norm='exact', whose statistics are the whole batch's, or larger micro-batches."
            )
        if call.running_mean is None or call.running_var is None:
            return call.as_asked()
        mean, var = torch.zeros_like(call.running_mean), torch.zeros_like(call.running_var)
        output = call.with_running(mean, var, 1.0)  # momentum 1: what is written is this micro-batch's own
        number = self._num_calls[name] = self._num_calls.get(name, -1) + 1
        moments = Moments(call.count, mean, var * ((call.count - 1) / call.count), call.momentum)
        running = Call(mean[:0], call.running_mean, call.running_var)
        self._current.append(((name, number), running, moments))
        return output

    def forget(self) -> None:
        """The micro-batch that ran last was dropped: its statistics do not count."""
        for key, call, _ in self._current:
            self._seen.setdefault(key, (call, []))
        self._current.clear()

    def close(self) -> None:
        """Make the one update of each layer, or one per call where the forward calls it more than once."""
        self.begin()
        calls = sorted(self._seen.items(), key=lambda item: (item[0][1], item[0][0]))
        own = [pool(parts) if parts else nothing(call) for _, (call, parts) in calls]
        for ((name, number), (call, _)), moments in zip(calls, pool_over_ranks(self._ranks, own), strict=True):
            if moments.count == 0:
                continue
            update_running(call, moments)
            if name in self._num_tracked and self._layers[name].training:
                self._layers[name].num_batches_tracked.copy_(self._num_tracked[name] + number + 1)  # type: ignore[union-attr]


@contextmanager
def merged(layers: Layers, ranks: Ranks) -> Iterator["Merging"]:
    """Inside this block each micro-batch has its own statistics; at the end the running ones get the big batch's update.

    `begin()` is to be called before each micro-batch. Merged are mean and variance of the activations as they were, each
    micro-batch normalised by itself; what did not run, having 0 units, has no part. An error leaves everything as it was.
    """
    merging = Merging(layers, ranks)
    try:
        with replaced(layers, merging.compute):
            yield merging
    except BaseException:
        merging.begin()
        raise
    merging.close()

"""Spectral norm: its power iteration advances in every forward, and has to advance once per batch."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils.spectral_norm import SpectralNorm

from anybatch.batch_norm.layers import overridden
from anybatch.core import NOTHING, PassHook, SpectralNormWeight, buffers_of, is_in_backward, pre_hooks_of
from anybatch.errors import UpdateError


@dataclass(frozen=True, slots=True)
class SpectralLayer:
    """A weight under spectral norm, as a parametrization or by the older hook."""

    owner: Any
    """The parametrization or the hook."""
    method: str
    """Its method that advances the iteration."""
    slots: tuple[tuple[nn.Module, str], ...]
    """Module and name of the two vectors of the iteration."""

    def snapshot(self) -> Callable[[], None]:
        """Copy the vectors; return a function that restores them."""
        held = [buffers_of(module).get(name) for module, name in self.slots]
        copies = [(vector, vector.detach().clone()) for vector in held if vector is not None]

        @torch.no_grad()
        def restore() -> None:
            for vector, was in copies:
                vector.copy_(was)

        return restore


def spectral_norms(model: nn.Module) -> tuple[SpectralLayer, ...]:
    """Find every weight of the model that is under spectral norm."""
    found = []
    for module in model.modules():
        if isinstance(module, SpectralNormWeight):
            found.append(SpectralLayer(module, "forward", ((module, "_u"), (module, "_v"))))
        for hook in pre_hooks_of(module).values():
            if isinstance(hook, SpectralNorm):
                slots = ((module, f"{hook.name}_u"), (module, f"{hook.name}_v"))
                found.append(SpectralLayer(hook, "compute_weight", slots))
    return tuple(found)


class Rewound(PassHook):
    """Restores the vectors before each micro-batch.

    The iteration depends on the weights alone, so that each micro-batch takes the same steps, and the last one leaves the
    vectors where one forward of the whole batch would.
    """

    def __init__(self, layers: Sequence[SpectralLayer]) -> None:
        self._layers = layers
        self._restores = [layer.snapshot() for layer in layers]
        self._is_in_lockstep = False

    def around_forward(self, micro_batch: int) -> AbstractContextManager[object]:
        for restore in () if self._is_in_lockstep else self._restores:
            restore()
        return NOTHING

    @contextmanager
    def in_lockstep(self, current: Callable[[], int]) -> Iterator[None]:
        """Rewind each call to where the first forward made the same call, because forwards take turns."""
        self._is_in_lockstep = True
        with ExitStack() as stack:
            for layer in self._layers:
                stack.enter_context(overridden(layer.owner, layer.method, _in_turns(layer, current)))
            yield


def _in_turns(layer: SpectralLayer, current: Callable[[], int]) -> Callable[..., Any]:
    """Wrap the layer's method: call n of any forward starts where call n of the first one did."""
    own = getattr(layer.owner, layer.method)
    num_calls: Counter[int] = Counter()
    restores: list[Callable[[], None]] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        if is_in_backward():
            raise UpdateError(
                "batch_norm='exact': a weight under spectral norm is inside a block under torch.utils.checkpoint, whose power "
                "iteration would step again in backward, once per micro-batch. Leave this block without checkpointing."
            )
        number = num_calls[current()]
        num_calls[current()] += 1
        if number == len(restores):
            restores.append(layer.snapshot())
        restores[number]()
        return own(*args, **kwargs)

    return call

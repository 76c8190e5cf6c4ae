"""Spectral norm: a power iteration that steps in every forward, and is to step once per batch, however it is cut."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm

from anybatch.core import NOTHING, PassHook, SpectralNormWeight, buffers_of, is_in_backward, pre_hooks_of
from anybatch.errors import UpdateError


@dataclass(frozen=True, slots=True)
class SpectralLayer:
    """A weight under spectral norm, as a parametrization or by the hook of before."""

    owner: Any
    """The parametrization, or the hook."""
    method: str
    """Its method that steps."""
    slots: tuple[tuple[nn.Module, str], ...]
    """Module and name of the two vectors of the power iteration."""

    def vectors(self) -> list[Tensor]:
        held = [buffers_of(module).get(name) for module, name in self.slots]
        return [vector for vector in held if vector is not None]


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
    """The iterations depend on the weights alone, so from the same start each micro-batch takes the same steps.

    After the last one they are where one forward of the whole batch leaves them.
    """

    def __init__(self, layers: Sequence[SpectralLayer]) -> None:
        self._layers = layers
        self._start = [_Moment.of(layer) for layer in layers]
        self._is_in_lockstep = False

    def around_forward(self, micro_batch: int) -> AbstractContextManager[object]:
        for moment in () if self._is_in_lockstep else self._start:
            moment.put_back()
        return NOTHING

    @contextmanager
    def in_lockstep(self, current: Callable[[], int]) -> Iterator[None]:
        """Rewind each call to where the first forward made the same call: forwards take turns in mid-way."""
        turns = [_Turns(layer, getattr(layer.owner, layer.method), current) for layer in self._layers]
        before = [layer.owner.__dict__.get(layer.method) for layer in self._layers]
        self._is_in_lockstep = True
        try:
            for layer, turn in zip(self._layers, turns, strict=True):
                layer.owner.__dict__[layer.method] = turn
            yield
        finally:
            for layer, method in zip(self._layers, before, strict=True):
                del layer.owner.__dict__[layer.method]
                if method is not None:
                    layer.owner.__dict__[layer.method] = method


@dataclass(frozen=True, slots=True)
class _Moment:
    """The vectors of one layer as they were."""

    vectors: list[Tensor]
    copies: list[Tensor]

    @classmethod
    def of(cls, layer: SpectralLayer) -> "_Moment":
        vectors = layer.vectors()
        return cls(vectors, [vector.detach().clone() for vector in vectors])

    @torch.no_grad()
    def put_back(self) -> None:
        for vector, was in zip(self.vectors, self.copies, strict=True):
            vector.copy_(was)


@dataclass(slots=True)
class _Turns:
    """One layer's calls, by forward: call number n of any forward starts where call number n of the first one did."""

    layer: SpectralLayer
    own: Callable[..., Any]
    current: Callable[[], int]
    calls: dict[int, int] = field(default_factory=dict)
    moments: list[_Moment] = field(default_factory=list)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_in_backward():
            raise UpdateError(
                "batch_norm='exact': a weight under spectral norm is inside a block under torch.utils.checkpoint, whose power "
                "iteration would step again in backward, once per micro-batch. Leave this block without checkpointing."
            )
        number = self.calls.get(self.current(), 0)
        self.calls[self.current()] = number + 1
        if number == len(self.moments):
            self.moments.append(_Moment.of(self.layer))
        self.moments[number].put_back()
        return self.own(*args, **kwargs)

"""What one run left in `.grad`: held, or kept aside; norms and distances a piece at a time, in float64."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from anybatch.state import CopyInPieces, TensorFile, pieces_of


@dataclass(frozen=True, slots=True)
class Gradient:
    """What one run left: its loss, and the gradients by parameter; None where the run did not touch one."""

    loss: float
    parameters: Mapping[str, Tensor | None]
    terms: Mapping[str, float] = field(default_factory=dict)
    """The norms of what micro-batches added, summed, by parameter; nothing of a run in one go."""

    @property
    def norm(self) -> float:
        """The norm of all gradients together."""
        return math.sqrt(sum(norm**2 for norm in self.norms.values()))

    @property
    def norms(self) -> dict[str, float]:
        """The norm of each parameter's gradient."""
        return {name: norm_of(grad) for name, grad in self.parameters.items()}

    def distances(self, other: "Gradient") -> dict[str, float]:
        """How far each parameter's gradient is from that of another run."""
        return {name: distance(grad, other.parameters[name]) for name, grad in self.parameters.items()}


class GradientAside:
    """The gradients of one run on disk, or from an accelerator on the host: they take none of the memory that is short."""

    def __init__(self, gradient: Gradient, file: TensorFile) -> None:
        self.norms = gradient.norms
        self._copies = {
            name: None if grad is None else CopyInPieces(grad, file) for name, grad in gradient.parameters.items()
        }

    def distances(self, other: Gradient) -> dict[str, float]:
        """How far each parameter's gradient is from that of another run."""
        return {name: self._distance(name, other.parameters[name]) for name in self._copies}

    def _distance(self, name: str, grad: Tensor | None) -> float:
        copy = self._copies[name]
        if copy is None or grad is None:
            return norm_of(grad) if copy is None else self.norms[name]
        flat = grad.detach().flatten()
        return float(_joined([_norm(kept.double() - flat[piece].double()) for piece, kept in copy]))


def norm_of(grad: Tensor | None) -> float:
    """The norm of a gradient, 0 for none."""
    return 0.0 if grad is None else float(_norm_in_pieces(grad))


def distance(one: Tensor | None, other: Tensor | None) -> float:
    """|one - other|, none being zero."""
    if one is None or other is None:
        return norm_of(one if other is None else other)
    flat, others = one.detach().flatten(), other.detach().flatten()
    pieces = pieces_of(flat.numel())
    return float(
        _joined([_norm(flat[piece].double() - others[piece].to(one.device, torch.float64)) for piece in pieces])
    )


def add_norm(terms: dict[str, Tensor], name: str, grad: Tensor) -> None:
    """A hook: what one micro-batch adds to a parameter's gradient."""
    values = grad.detach().coalesce().values() if grad.is_sparse else grad.detach()
    norm = _norm_in_pieces(values)
    terms[name] = terms[name] + norm if name in terms else norm


def gradients_of(named: Mapping[str, nn.Parameter]) -> dict[str, Tensor | None]:
    """Those that are there, by name."""
    return {name: None if held.grad is None else held.grad.detach().to_dense() for name, held in named.items()}


def _norm_in_pieces(values: Tensor) -> Tensor:
    flat = values.flatten()
    return _joined([_norm(flat[piece]) for piece in pieces_of(flat.numel())])


def _norm(values: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(values, dtype=torch.float64)
    return norm


def _joined(norms: list[Tensor]) -> Tensor:
    """The norm of all pieces together: a float64 copy of a whole gradient takes twice its memory."""
    if len(norms) == 1:
        return norms[0]
    return _norm(torch.stack(norms)) if norms else torch.zeros((), dtype=torch.float64)

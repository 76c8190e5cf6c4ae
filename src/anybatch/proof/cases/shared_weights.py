"""Copies of a model that share its weights, for where there is no memory for others."""

import torch
from torch import Tensor, nn

from anybatch.proof.cases.copies import copy_model
from anybatch.proof.cases.raised import is_below, raised
from anybatch.state import CopyInPieces, TensorFile


class SharedWeights:
    """Parameters and buffers of a model, which copies of it use as they are; what a run writes to them is put back.

    Copies to put back from lie on disk, or from an accelerator on the host. What is raised to `dtype`, where there is one, or
    is of a type of its own, is not shared.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype | None = None) -> None:
        self._model, self._dtype = model, dtype
        self._held = {id(held): held for held in (*model.parameters(), *model.buffers()) if _is_plain(held)}
        file = TensorFile()
        shared = [held for held in self._held.values() if not is_below(held.dtype, dtype)]
        self._copies = [(held.data, CopyInPieces(held, file)) for held in shared]
        self.is_attention_visible = False
        """Whether attention runs by kernels whose dropout is an operation of its own, which take more memory."""

    def twin(self) -> nn.Module:
        """Another model of the same weights and modes, with no gradients."""
        dtype = self._dtype
        known: dict[int, object] = {number: _alias(held, dtype) for number, held in self._held.items()}
        twin = copy_model(self._model, known=known)
        for parameter in twin.parameters():
            if is_below(parameter.dtype, dtype):
                parameter.data = raised(parameter.data, dtype)
        return twin

    def put_back(self) -> None:
        """Make the weights what they were, where a run has written to them."""
        for held, copied in self._copies:
            flat = held.flatten()
            changed = [(piece, was) for piece, was in copied if not _is_same(flat[piece], was)]
            if changed:
                for piece, was in changed:
                    flat[piece] = was
                held.copy_(flat.view(held.shape))


def _is_plain(held: Tensor) -> bool:
    return type(held) in (Tensor, nn.Parameter) and held.layout is torch.strided and held.is_leaf


def _alias(held: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A tensor of its own with the same memory; in a finer precision, with memory of its own."""
    data = raised(held.data, dtype)
    alias = data if data is not held.data else data.detach()
    return (
        nn.Parameter(alias, requires_grad=held.requires_grad)
        if isinstance(held, nn.Parameter)
        else alias.requires_grad_(held.requires_grad)
    )


def _is_same(one: Tensor, other: Tensor) -> bool:
    """To the bit: a nan is the same as itself."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))

"""Batches whose rows are another dim than 0: seen with rows first, and put back; and batches that may be of that kind."""

from collections.abc import Mapping

from torch import Tensor, nn

from anybatch.batches.counting import num_rows
from anybatch.batches.nesting import Batch, map_tensors
from anybatch.errors import BatchError


def rows_first(batch: Batch, dim: int) -> Batch:
    """Views of the tensors with their dim `dim` as dim 0; those with fewer dims have their rows there already.

    >>> import torch
    >>> [tuple(tensor.shape) for tensor in rows_first((torch.zeros(7, 4, 3), torch.zeros(4)), 1)]
    [(4, 7, 3), (4,)]
    """
    return map_tensors(batch, lambda tensor: tensor.movedim(dim, 0) if tensor.dim() > dim else tensor)


def rows_in_dim(batch: Batch, dim: int) -> Batch:
    """The inverse of `rows_first`, contiguous: models take .view() of what they are given."""
    return map_tensors(batch, lambda tensor: _put_back(tensor, dim))


def _put_back(tensor: Tensor, dim: int) -> Tensor:
    return tensor.movedim(0, dim).contiguous() if tensor.dim() > dim else tensor


def check_row_dim(model: nn.Module, batch: Batch) -> None:
    """Refuse a batch that was cut along dim 0 where dim 1 may be the rows: the model takes time first, and both dims agree."""
    if isinstance(batch, Mapping) and "attention_mask" in batch:
        return  # rows x tokens, as every tokenizer has it
    layer = next(
        (f"{name} ({type(module).__name__})" for name, module in model.named_modules() if _takes_time_first(module)), ""
    )
    if not layer:
        return
    try:
        time, rows = num_rows(batch), num_rows(rows_first(batch, 1))
    except BatchError:
        return  # the leaves agree on dim 0 alone
    raise BatchError(
        f"{layer} takes time first and rows second (batch_first=False), and this batch has {time} entries in dim 0 and {rows} "
        f"in dim 1 of all its tensors: either may be its rows. Say which: micro_batch=Rows(n, batch_dim=1) for (time, rows), "
        "Rows(n, batch_dim=0) for (rows, time)."
    )


def _takes_time_first(module: nn.Module) -> bool:
    if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
        return not module.self_attn.batch_first
    return isinstance(module, nn.RNNBase) and not module.batch_first

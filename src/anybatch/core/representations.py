"""What a coupled loss sees: the representations of all rows, of all micro-batches and ranks, and the way back to each."""

from collections.abc import Sequence

from torch import Tensor, nn

from anybatch.core.batch import reorder_rows
from anybatch.core.nesting import Batch, map_tensors, tensors
from anybatch.core.objective import Coupled
from anybatch.core.plan import BatchPlan
from anybatch.core.ranks import Ranks
from anybatch.errors import LossError


def alone(tensor: Tensor) -> Tensor:
    """The tensor without what it was cut from: the first position of every row must not keep all positions alive."""
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


def leaf(tensor: Tensor) -> Tensor:
    """The tensor as the start of a graph of its own."""
    return alone(tensor.detach()).requires_grad_(tensor.is_floating_point() or tensor.is_complex())


def no_rows(representations: Batch) -> Batch:
    """The same nesting with no row of its own, and the graph to get zero gradients from."""
    return map_tensors(representations, lambda tensor: tensor[:0] if tensor.dim() > 0 else tensor)


def in_own_order(plan: BatchPlan, joined: Batch) -> Batch:
    """The joined representations of this rank's rows in the order of its batch, however a split has sorted them.

    Rows that were dropped are left out; a loss may look at places: neighbours, [chosen; rejected], lists of one question.
    """
    rows = [row for one in plan.passes if one.reports for row in plan.cut.row_numbers[one.micro_batch]]
    order = sorted(range(len(rows)), key=rows.__getitem__)
    if plan.cut.cut is None or order == list(range(len(rows))):
        return joined
    for tensor in tensors(joined):
        if tensor.dim() > 0 and len(tensor) != len(rows):
            raise LossError(
                f"encode returned {len(tensor)} entries for {len(rows)} rows, which were sorted to be cut: whose they are "
                "cannot be told, so the loss would not see the batch's own order. Return one entry per row, rows first (rows x "
                "views x width for several), or cut by Rows(n), which leaves rows in their order."
            )
    return reorder_rows(joined, order)


def rows_of_all(ranks: Ranks, own: Batch) -> Batch:
    """The representations of every rank's rows, by rank; gradients reach this rank's own. 0-dim tensors are its own."""
    if ranks.size == 1:
        return own
    _check_tensors(own)
    counts = ranks.gather([len(tensor) for tensor in tensors(own) if tensor.dim() > 0])
    columns = iter(list(zip(*counts, strict=True)))
    return map_tensors(
        own, lambda tensor: ranks.all_rows(tensor, [int(n) for n in next(columns)]) if tensor.dim() > 0 else tensor
    )


def share_out(ranks: Ranks, parameters: Sequence[nn.Parameter], leaves: Sequence[Batch]) -> None:
    """Every rank computed the one loss, and so has its own parameters' whole gradient: leave each its part of the sum."""
    if ranks.size == 1:
        return
    held = [tensor.grad for nest in leaves for tensor in tensors(nest) if tensor.dim() == 0]
    for grad in [*held, *(parameter.grad for parameter in parameters)]:
        if grad is not None:
            grad.div_(ranks.size)


def roots_of(representations: Batch, leaves: Batch) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that backward starts from, and the gradients that the loss left in their leaves."""
    chosen = [
        (root, leaf.grad)
        for root, leaf in zip(tensors(representations), tensors(leaves), strict=True)
        if root.requires_grad and leaf.grad is not None
    ]
    return [root for root, _ in chosen], [grad for _, grad in chosen if grad is not None]


def check_graph(coupled: Coupled, representations: Batch) -> None:
    """Refuse representations from which no parameter could get a gradient."""
    held = list(tensors(representations))
    if not held:
        raise LossError(
            f"encode returned {type(representations).__name__} without a tensor; expected representations, rows first: "
            "a tensor or a nesting of tensors."
        )
    if not any(tensor.requires_grad for tensor in held) and not coupled.parameters():
        raise LossError(
            "the representations do not depend on any parameter that requires a gradient. Check that the model is not "
            "frozen whole, and that encode neither detaches its output nor runs under torch.no_grad()."
        )


def check_same_shapes(index: int, first: Batch, again: Batch) -> None:
    """Refuse an encode whose second forward of the same rows gave other shapes than the first."""
    for one, other in zip(tensors(again), tensors(first), strict=True):
        if one.shape != other.shape:
            raise LossError(
                f"encode gave shape {tuple(other.shape)} for micro-batch {index}, and {tuple(one.shape)} when it ran "
                "again. It must depend on the model, the rows and torch's random state only."
            )


def _check_tensors(representations: Batch) -> None:
    """Lists of strings or numbers, one per row, are not gathered over ranks."""
    for item in representations if isinstance(representations, list | tuple) else ():
        if isinstance(item, str | int | float):
            raise LossError(
                f"encode returned a list that holds {item!r:.40}; over several ranks only tensors are gathered. Return labels "
                "and the like as tensors, one entry per row."
            )

"""Terms of a loss: the nodes of its graph that reduce many numbers to one, and the weight of each.

The gradient that arrives at such a node is the weight of its mean or sum in this update: 1/n, 1, scale/n, n_k/N. A prehook
on the node reads it while backward runs; nothing is added to the forward pass.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from anybatch.core import SAVED, outputs_of
from anybatch.doctor.log import CRITERIA

MOST_NODES = 400
MEAN, SUM = 1, 2  # torch's numbers for reductions
PASSED = ("View", "Reshape", "Neg", "Squeeze", "Unsqueeze", "ToCopy", "UnsafeView", "Sum", "Div")
"""Nodes between a sum and the mask that multiplied its terms."""


def number_of(tensor: Tensor) -> float:
    """Return the one number of a tensor without `float()` or `item()`, which are patched to see the user's reads."""
    found: Any = tensor.tolist()
    while isinstance(found, list):
        (found,) = found
    return float(found)


def saved_by(node: Any, name: str) -> Any:
    """Return a value that a node of the graph saved, such as "target"; None if it saved none of that name."""
    return getattr(node, SAVED + name, None)


class TermHook:
    """Prehook on a reducing node that reads the weight of its term."""

    def __init__(self, node: Any) -> None:
        self.node = node
        self._weight: float | None = None
        self._facts = _facts(node)
        self._handle = node.register_prehook(self._arrive)

    def _arrive(self, gradients: tuple[Tensor | None, ...]) -> None:
        gradient = gradients[0]
        self._weight = None if gradient is None or gradient.numel() != 1 else number_of(gradient)

    def close(self) -> dict[str, Any] | None:
        """Remove the hook and return the term for the log; None if no gradient reached the node."""
        self._handle.remove()
        self.node = None
        return None if self._weight is None else {**self._facts, "weight": self._weight}


def reducing_nodes(root: Any) -> Iterator[Any]:
    """Walk the scalar part of a graph down from the loss, and yield the nodes that reduce many numbers to one."""
    waiting: list[Any] = [root]
    seen: set[Any] = set()
    while waiting and len(seen) < MOST_NODES:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name, children = node.name(), _children(node)
        if name.startswith(CRITERIA) and saved_by(node, "reduction") in (MEAN, SUM):
            yield node
        elif "AccumulateGrad" in name:
            continue
        elif not any(_num_out(child) > 1 for child in children):
            waiting += children
        elif scalars := _stacked(children):
            waiting += scalars
        elif not _is_penalty(node):
            yield node


def _stacked(children: list[Any]) -> list[Any]:
    """Return the scalars of `torch.stack(losses).mean()`, each of which is a loss; else nothing."""
    if len(children) != 1 or not children[0].name().startswith(("Stack", "Cat")):
        return []
    parts = _children(children[0])
    return parts if all(_num_out(part) == 1 for part in parts) else []


def _is_penalty(node: Any) -> bool:
    """Return True if the node depends on one parameter alone, through at most five nodes."""
    for _ in range(5):
        children = _children(node)
        if len({id(child) for child in children}) != 1:
            return False
        node = children[0]
        if "AccumulateGrad" in node.name():
            return isinstance(node.variable, torch.nn.Parameter)
    return False


def _children(node: Any) -> list[Any]:
    return [child for child, _ in node.next_functions if child is not None]


def _num_out(node: Any) -> int:
    outputs = outputs_of(node)
    return math.prod(outputs[0].shape) if outputs else 1


def _facts(node: Any) -> dict[str, Any]:
    name, reduction = node.name().partition("Backward")[0], saved_by(node, "reduction")
    reduced = {"role": name, "kind": "sum" if reduction == SUM else "mean"}
    if name.startswith("NllLoss"):
        return {**reduced, **_nll(node)}
    if reduction in (MEAN, SUM):
        return {**reduced, "counts": _counts(tuple(saved_by(node, "self").shape))}
    if name in ("Mean", "Sum", "NanSum", "Nansum"):
        masked, pairs = _masked(node)
        counts = _counts(tuple(saved_by(node, "self_sym_sizes") or ()))
        if name == "Mean":
            return {"role": name, "kind": "mean", "counts": counts, **pairs}
        return {"role": name, "kind": "sum", "counts": counts if masked is None else [masked, *counts], **pairs}
    return {"role": name, "kind": "opaque", "counts": []}


def _counts(sizes: tuple[int, ...]) -> list[float]:
    """Return the number of elements and of rows: a sum over both may be divided by either."""
    return list(dict.fromkeys([float(math.prod(sizes)), float(sizes[0]) if sizes else 1.0]))


def _nll(node: Any) -> dict[str, Any]:
    target, total = saved_by(node, "target"), saved_by(node, "total_weight")
    units = number_of(total) if total is not None and total.numel() else 0.0
    counted, ignored = units, saved_by(node, "ignore_index")
    if not units or saved_by(node, "weight") is not None:
        ignored -= 2**64 if ignored >= 2**63 else 0  # the graph saves -100 as an unsigned number
        counted = number_of((target != ignored).sum())
    rows = int(target.shape[0]) if target.dim() else 1
    is_square = rows > 1 and tuple(saved_by(node, "self").shape) == (rows, rows)
    is_pairs = is_square and bool((target.sort().values == torch.arange(rows, device=target.device)).all())
    counts = [units] if units == counted == rows else list(dict.fromkeys([units or counted, counted, float(rows)]))
    return {"counts": counts, "pairs": rows} if is_pairs else {"counts": counts}


def _masked(node: Any) -> tuple[float | None, dict[str, Any]]:
    """Return the number of terms of a sum left by the mask or criterion before it; and `pairs` of a contrastive loss."""
    for _ in range(6):
        children = _children(node)
        if not children:
            break
        node = children[0]
        name = node.name()
        if name.startswith("NllLoss"):
            facts = _nll(node)  # reduction="none": its sum of weights is 0
            return facts.pop("counts")[0], facts
        if name.startswith("MulBackward"):
            for mask in (saved_by(node, "other"), saved_by(node, "self")):
                is_given = isinstance(mask, Tensor) and not mask.requires_grad and mask.numel() > 1
                if is_given and bool((mask >= 0).all()):
                    return number_of(mask.sum()), {}
        elif not name.startswith(PASSED):
            break
    return None, {}

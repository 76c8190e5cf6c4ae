"""Terms of a loss: the nodes of its graph that reduce many numbers to one, and the weight that each gets.

The gradient that arrives at such a node is the weight of its mean, or of its sum, in this update: 1/n, 1, scale/n, n_k/N. It is
read by a hook in front of the node while backward runs; nothing lies on the forward path.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from anybatch.core import SAVED, outputs_of
from anybatch.doctor.updates import CRITERIA

MOST_NODES = 400
MEAN, SUM = 1, 2
"""How torch's criteria number their reductions."""
PASSED = ("View", "Reshape", "Neg", "Squeeze", "Unsqueeze", "ToCopy", "UnsafeView", "Sum", "Div")
"""Nodes between a sum and the mask that multiplied its terms."""


def number_of(tensor: Tensor) -> float:
    """The one number of a tensor, read past the watch on `float()` and `item()`, which is for the user's reads."""
    found: Any = tensor.tolist()
    while isinstance(found, list):
        (found,) = found
    return float(found)


def saved_by(node: Any, name: str) -> Any:
    """A value that a node of the graph keeps, such as "target"; None where it keeps nothing of that name."""
    return getattr(node, SAVED + name, None)


class TermHook:
    """One such node of one loss, and the weight that it was given."""

    def __init__(self, node: Any) -> None:
        self.node = node
        self.weight: float | None = None
        self.facts = _facts(node)
        self.handle = node.register_prehook(self._arrive)

    def _arrive(self, gradients: tuple[Tensor | None, ...]) -> None:
        gradient = gradients[0]
        self.weight = None if gradient is None or gradient.numel() != 1 else number_of(gradient)

    def close(self) -> dict[str, Any] | None:
        """Remove the hook. Returns the term for the log; None if no gradient came to the node."""
        self.handle.remove()
        self.node = None
        return None if self.weight is None else {**self.facts, "weight": self.weight}


def watch_terms(loss: Tensor) -> list[TermHook]:
    """Hooks on the terms of a loss that is one number."""
    return [TermHook(node) for node in _reducing(loss.grad_fn)]


def _reducing(root: Any) -> Iterator[Any]:
    """From one number down to where many become one."""
    waiting: list[Any] = [root]
    seen: set[Any] = set()
    while waiting and len(seen) < MOST_NODES:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name = node.name()
        if name.startswith(CRITERIA) and saved_by(node, "reduction") in (MEAN, SUM):
            yield node
            continue
        if "AccumulateGrad" in name:
            continue
        children = _children(node)
        if not any(_num_out(child) > 1 for child in children):
            waiting += children
        elif scalars := _stacked(node):
            waiting += scalars
        elif not _is_of_weights(node):
            yield node


def _stacked(node: Any) -> list[Any]:
    """The numbers of `torch.stack(losses).mean()`: each is a loss of its own."""
    children = _children(node)
    if len(children) != 1 or not children[0].name().startswith(("Stack", "Cat")):
        return []
    parts = _children(children[0])
    return parts if all(_num_out(part) == 1 for part in parts) else []


def _is_of_weights(node: Any) -> bool:
    """A penalty on parameters has no rows: a chain that ends in a leaf after a few steps."""
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
    name = node.name().partition("Backward")[0]
    reduction = saved_by(node, "reduction")
    if name.startswith("NllLoss"):
        return {"role": name, "kind": "sum" if reduction == SUM else "mean"} | _nll(node)
    if reduction in (MEAN, SUM):
        shape = tuple(saved_by(node, "self").shape)
        return {"role": name, "kind": "sum" if reduction == SUM else "mean", "counts": _counts(shape)}
    if name in ("Mean", "Sum", "NanSum", "Nansum"):
        sizes = tuple(saved_by(node, "self_sym_sizes") or ())
        share, marks = _kept(node)
        is_mean = name == "Mean"
        counts = [share] if share is not None and not is_mean else []
        return {"role": name, "kind": "mean" if is_mean else "sum", "counts": counts + _counts(sizes), **marks}
    return {"role": name, "kind": "opaque", "counts": []}


def _counts(sizes: tuple[int, ...]) -> list[float]:
    """All numbers, and the rows: a sum over both is divided by the one or the other."""
    return list(dict.fromkeys([float(math.prod(sizes)), float(sizes[0]) if sizes else 1.0]))


def _nll(node: Any) -> dict[str, Any]:
    target, total = saved_by(node, "target"), saved_by(node, "total_weight")
    units = number_of(total) if total is not None and total.numel() else 0.0
    counted, ignored = units, saved_by(node, "ignore_index")
    if not units or saved_by(node, "weight") is not None:
        ignored -= 2**64 if ignored >= 2**63 else 0  # the graph keeps -100 as a number without a sign
        counted = number_of((target != ignored).sum())
    rows = int(target.shape[0]) if target.dim() else 1
    is_square = rows > 1 and tuple(saved_by(node, "self").shape) == (rows, rows)
    is_pairs = is_square and bool((target.sort().values == torch.arange(rows, device=target.device)).all())
    counts = [units] if units == counted == rows else list(dict.fromkeys([units or counted, counted, float(rows)]))
    return {"counts": counts, "pairs": rows} if is_pairs else {"counts": counts}


def _is_mask(tensor: Any) -> bool:
    """True of weights from outside, none below 0."""
    is_given = isinstance(tensor, Tensor) and not tensor.requires_grad and tensor.numel() > 1
    return is_given and bool((tensor >= 0).all())


def _kept(node: Any) -> tuple[float | None, dict[str, Any]]:
    """How many terms of a sum count: what a mask or weights multiplied it with, or what a criterion ignored."""
    for _ in range(6):
        children = _children(node)
        if not children:
            break
        node = children[0]
        name = node.name()
        if name.startswith("NllLoss"):
            facts = _nll(node)  # of one loss per row: its sum of weights is 0
            return facts.pop("counts")[0], facts
        if name.startswith("MulBackward"):
            for mask in (saved_by(node, "other"), saved_by(node, "self")):
                if _is_mask(mask):
                    return number_of(mask.sum()), {}
        elif not name.startswith(PASSED):
            break
    return None, {}

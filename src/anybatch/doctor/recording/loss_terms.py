"""What a loss is made of: the nodes of its graph that reduce many terms to one number, and the weight that each gets.

The gradient that arrives at such a node is the weight of its mean, or of its sum, in this update: 1/n, 1, scale/n, n_k/N. It is
read by a hook in front of the node while backward runs; nothing lies on the forward path.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from anybatch.core import SAVED, outputs_of
from anybatch.doctor.loops import CRITERIA

MOST_NODES = 400
MEAN, SUM = 1, 2
"""How torch's criteria number their reductions."""


def number_of(tensor: Tensor) -> float:
    """The one number of a tensor, read past the watch on `float()` and `item()`, which is for the user's reads."""
    found: Any = tensor.tolist()
    while isinstance(found, list):
        (found,) = found
    return float(found)


def saved_by(node: Any, name: str) -> Any:
    """What a node of the graph keeps, such as "target"; None where it keeps nothing of that name."""
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
        """What was seen, for the log; None of a node that no gradient came to."""
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
        if _is_criterion(node, name):
            yield node
            continue
        if "AccumulateGrad" in name:
            continue
        children = [child for child, _ in node.next_functions if child is not None]
        if not any(_num_out(child) > 1 for child in children):
            waiting += children
        elif scalars := _stacked(node):
            waiting += scalars
        elif not _is_of_weights(node):
            yield node


def _stacked(node: Any) -> list[Any]:
    """The numbers of `torch.stack(losses).mean()`: each is a loss of its own."""
    (child, *others) = [child for child, _ in node.next_functions if child is not None] or [None]
    if others or child is None or not child.name().startswith(("Stack", "Cat")):
        return []
    parts = [part for part, _ in child.next_functions if part is not None]
    return parts if all(_num_out(part) == 1 for part in parts) else []


def _is_of_weights(node: Any) -> bool:
    """A penalty on parameters has no rows: a chain that ends in a leaf after a few steps."""
    for _ in range(5):
        children = [child for child, _ in node.next_functions if child is not None]
        if len({id(child) for child in children}) != 1:
            return False
        node = children[0]
        if "AccumulateGrad" in node.name():
            return isinstance(node.variable, torch.nn.Parameter)
    return False


def _num_out(node: Any) -> int:
    outputs = outputs_of(node)
    return math.prod(outputs[0].shape) if outputs else 1


def _is_criterion(node: Any, name: str) -> bool:
    return name.startswith(CRITERIA) and saved_by(node, "reduction") in (MEAN, SUM)


def _facts(node: Any) -> dict[str, Any]:
    name = node.name().partition("Backward")[0]
    reduction = saved_by(node, "reduction")
    if name.startswith("NllLoss"):
        return {"role": name, "kind": "sum" if reduction == SUM else "mean"} | _nll(node)
    if reduction in (MEAN, SUM):
        own = saved_by(node, "self")
        return {"role": name, "kind": "sum" if reduction == SUM else "mean", "counts": _counts(tuple(own.shape), 1.0)}
    if name in ("Mean", "Sum", "NanSum", "Nansum"):
        sizes = tuple(saved_by(node, "self_sym_sizes") or ())
        share, marks = _kept(node)
        counts = [share] if share is not None and name != "Mean" else []
        return {
            "role": name,
            "kind": "mean" if name == "Mean" else "sum",
            "counts": counts + _counts(sizes, 1.0),
            **marks,
        }
    return {"role": name, "kind": "opaque", "counts": []}


def _counts(sizes: tuple[int, ...], share: float) -> list[float]:
    """All numbers, and the rows: a sum over both is divided by the one or the other."""
    numel = 1.0
    for size in sizes:
        numel *= size
    return list(dict.fromkeys([numel * share, float(sizes[0]) if sizes else 1.0]))


def _nll(node: Any) -> dict[str, Any]:
    target, total = saved_by(node, "target"), saved_by(node, "total_weight")
    units = number_of(total) if total is not None and total.numel() else 0.0
    is_weighted = not units or saved_by(node, "weight") is not None
    counted = number_of((target != _signed(saved_by(node, "ignore_index"))).sum()) if is_weighted else units
    rows = int(target.shape[0]) if target.dim() else 1
    is_square = rows > 1 and tuple(saved_by(node, "self").shape) == (rows, rows)
    is_pairs = is_square and bool((target.sort().values == torch.arange(rows, device=target.device)).all())
    counts = [units] if units == counted == rows else list(dict.fromkeys([units or counted, counted, float(rows)]))
    return {"counts": counts, "pairs": rows} if is_pairs else {"counts": counts}


def _signed(number: int) -> int:
    """The graph keeps -100 as a number without a sign."""
    return number - 2**64 if number >= 2**63 else number


def _is_mask(tensor: Any) -> bool:
    """Weights from outside, none below 0."""
    is_given = isinstance(tensor, Tensor) and not tensor.requires_grad and tensor.numel() > 1
    return is_given and bool((tensor >= 0).all())


def _kept(node: Any) -> tuple[float | None, dict[str, Any]]:
    """How many terms of a sum count: what a mask or weights multiplied it with, or what a criterion ignored."""
    marks: dict[str, Any] = {}
    for _ in range(6):
        children = [child for child, _ in node.next_functions if child is not None]
        if not children:
            return None, marks
        node = children[0]
        name = node.name()
        if name.startswith("NllLoss"):
            facts = _nll(node)
            return facts["counts"][1], {key: facts[key] for key in ("pairs",) if key in facts}
        if name.startswith("MulBackward"):
            for side in ("other", "self"):
                mask = saved_by(node, side)
                if _is_mask(mask):
                    return number_of(mask.sum()), marks
        elif not name.startswith(
            ("View", "Reshape", "Neg", "Squeeze", "Unsqueeze", "ToCopy", "UnsafeView", "Sum", "Div")
        ):
            return None, marks
    return None, marks

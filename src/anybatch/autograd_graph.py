"""The graph behind a tensor: which leaves a backward pass from it would reach."""

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from torch import Tensor


def leaves_of(roots: Iterable[Tensor], *, beyond: Collection[Any] = ()) -> Iterator[Tensor]:
    """Every leaf that backward from `roots` would give a gradient, once; the nodes `beyond` are not passed through.

    What a block under reentrant checkpointing will compute only in backward is not seen.
    """
    nodes = []
    for root in roots:
        if root.grad_fn is not None:
            nodes.append(root.grad_fn)
        elif root.requires_grad:
            yield root
    yield from (node.variable for node in _nodes(nodes, beyond) if type(node).__name__ == "AccumulateGrad")


def nodes_named(root: Tensor, prefix: str) -> Iterator[Any]:
    """The nodes behind `root` whose name begins with `prefix`."""
    return (node for node in _nodes([root.grad_fn], ()) if type(node).__name__.startswith(prefix))


def _nodes(start: Iterable[Any], beyond: Collection[Any]) -> Iterator[Any]:
    waiting = [node for node in start if node is not None]
    seen = set(beyond)  # holds on to the nodes: torch makes a node's Python object anew where nobody does
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        waiting.extend(earlier for earlier, _ in node.next_functions if earlier is not None)

"""The graph behind a tensor: which leaves a backward pass from it would reach."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor


def leaves_of(roots: Iterable[Tensor], *, beyond: Collection[Any] = ()) -> Iterator[Tensor]:
    """Every leaf that backward from `roots` would give a gradient, once; the nodes `beyond` are not passed through.

    What a block under reentrant checkpointing will compute only in backward is not seen.
    """
    nodes = []
    for root in roots:
        if root.grad_fn is not None:
            nodes.append(_node_of(root))
        elif root.requires_grad:
            yield root
    yield from (node.variable for node in _nodes(nodes, beyond) if type(node).__name__ == "AccumulateGrad")


def nodes_named(root: Tensor, prefix: str) -> Iterator[Any]:
    """The nodes behind `root` whose name begins with `prefix`."""
    return (node for node in _nodes([_node_of(root)], ()) if type(node).__name__.startswith(prefix))


def places_behind(root: Tensor, nodes: Sequence[Any]) -> list[int]:
    """Which of `nodes`, by number, a backward pass from `root` would reach."""
    reached = set(_nodes([_node_of(root)], ()))
    return [place for place, node in enumerate(nodes) if node in reached]


def _node_of(root: Tensor) -> Any:
    """The node that made `root`. DDP passes all outputs of a module through one node: behind that, the one of this output."""
    node = root.grad_fn
    if type(node).__name__ != "_DDPSinkBackward":
        return node
    assert node is not None
    return node.next_functions[root.output_nr][0]


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

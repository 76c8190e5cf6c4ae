"""What gradient checkpointing would save: the repeated blocks of a model, recomputed in backward."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


def repeated_blocks(model: nn.Module) -> tuple[str, list[nn.Module]] | None:
    """The path and the modules of the list of blocks with most parameters; None where the model repeats nothing.

    A list is an `nn.ModuleList` or `nn.Sequential`; its blocks are the children of its most frequent kind that have
    children of their own.
    """
    best: tuple[int, str, list[nn.Module]] | None = None
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        kinds: dict[type, list[nn.Module]] = {}
        for child in module:
            if next(child.children(), None) is not None:
                kinds.setdefault(type(child), []).append(child)
        for blocks in kinds.values():
            weight = sum(parameter.numel() for block in blocks for parameter in block.parameters())
            if len(blocks) > 1 and (best is None or weight > best[0]):
                best = weight, path, blocks
    return None if best is None else (best[1], best[2])


@contextmanager
def checkpointed(blocks: list[nn.Module]) -> Iterator[None]:
    """Inside this block each of these modules keeps its inputs only, and runs again in backward."""
    before: list[tuple[nn.Module, Any]] = [(block, block.__dict__.get("forward")) for block in blocks]
    try:
        for block in blocks:
            block.__dict__["forward"] = partial(checkpoint, block.forward, use_reentrant=False)
        yield
    finally:
        for block, forward in before:
            if forward is None:
                block.__dict__.pop("forward", None)
            else:
                block.__dict__["forward"] = forward

"""Turn on gradient checkpointing in any model that repeats a block."""

from functools import partial
from inspect import signature

from torch import nn
from torch.utils.checkpoint import checkpoint

from anybatch.core import NormLayer, call_hooks_of
from anybatch.errors import PlanError


def recompute_blocks(model: nn.Module) -> str:
    """Turn on checkpointing in a copy of a model, and describe the blocks that run again in backward.

    Uses the model's own `gradient_checkpointing_enable`, or wraps each block of its largest list.

    Raises:
        PlanError: If no block repeats, checkpointing is on already, or a second forward of a block has side effects.
    """
    if getattr(model, "is_gradient_checkpointing", False):
        raise PlanError("it is on already")
    path, blocks = repeated_blocks(model)
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if not blocks and enable is None:
        raise PlanError("the model has no list of blocks that have children, and no gradient_checkpointing_enable()")
    _check_blocks(path, blocks)
    where = path or "the model"
    named = f"the {len(blocks)} {type(blocks[0]).__name__} of {where}" if blocks else "the model's own way"
    if callable(enable):
        takes_options = "gradient_checkpointing_kwargs" in signature(enable).parameters
        try:
            enable(**({"gradient_checkpointing_kwargs": {"use_reentrant": False}} if takes_options else {}))
            return named
        except ValueError as error:  # a model of transformers that does not support it
            if not blocks:
                raise PlanError(str(error)) from error
    for block in blocks:
        vars(block)["forward"] = partial(checkpoint, block.forward, use_reentrant=False)
    return named


def _check_blocks(path: str, blocks: list[nn.Module]) -> None:
    for index, block in enumerate(blocks):
        for name, module in block.named_modules(prefix=f"{path}.{index}".lstrip(".")):
            if isinstance(module, NormLayer) and module.track_running_stats:
                raise PlanError(f"{name} ({type(module).__name__}) would count its running statistics twice")
            if any(call_hooks_of(module)):
                raise PlanError(f"{name} has hooks on its forward, which would be called twice")


def repeated_blocks(model: nn.Module) -> tuple[str, list[nn.Module]]:
    """Return the path and the modules of the list of blocks with most parameters; no modules if nothing repeats.

    A list is an `nn.ModuleList` or `nn.Sequential`. Its blocks are children of one class that have children of their own.
    """
    most, best = -1, ("", list[nn.Module]())
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        kinds: dict[type, list[nn.Module]] = {}
        for child in dict.fromkeys(module):
            if next(child.children(), None) is not None:
                kinds.setdefault(type(child), []).append(child)
        for blocks in kinds.values():
            weight = sum(parameter.numel() for block in blocks for parameter in block.parameters())
            if len(blocks) > 1 and weight > most:
                most, best = weight, (path, blocks)
    return best

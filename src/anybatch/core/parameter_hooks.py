"""Hooks on parameters: backward calls them once per micro-batch, with a part of the gradient that they are meant for."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from anybatch.core.torch_private import STEPPED_IN_BACKWARD, gradient_hooks_of, is_sharded
from anybatch.errors import UpdateError

OWN = ("torch.nn.parallel.", "torch.distributed.fsdp.", "torch.distributed._composable.", "anybatch.")
"""Whose hooks know of micro-batches: DDP's and FSDP's, which we tell when to synchronise, and our own meters."""


def check_hooks(
    parameters: Iterable[nn.Parameter], names: Callable[[], Iterable[tuple[str, nn.Parameter]]], num_passes: int
) -> None:
    """Refuse parameters with a hook of the user's, where `num_passes` backward passes would call it.

    Parameters sharded by `fully_shard` are left alone: FSDP2 calls their hooks once, with the whole gradient.
    """
    if num_passes < 2:
        return
    for parameter in parameters:
        before, after = gradient_hooks_of(parameter)
        if before or after or STEPPED_IN_BACKWARD in parameter.__dict__:
            for how, hook in _foreign(parameter):
                name = next((name for name, other in names() if other is parameter), None)
                _refuse(f"shape {tuple(parameter.shape)}" if name is None else repr(name), how, hook, num_passes)


def _foreign(parameter: nn.Parameter) -> list[tuple[str, Any]]:
    """The hooks that are the user's, and how each was set."""
    if is_sharded(parameter):
        return []
    before, after = gradient_hooks_of(parameter)
    hooks = [("register_hook", hook) for hook in (before or {}).values()]
    hooks += [("register_post_accumulate_grad_hook", hook) for hook in (after or {}).values()]
    foreign = [(how, hook) for how, hook in hooks if not _module_of(hook).startswith(OWN)]
    stepping = parameter.__dict__.get(STEPPED_IN_BACKWARD, ())
    return foreign + [("an optimizer in backward", optimizer) for optimizer in stepping]


def _module_of(hook: Any) -> str:
    """Where a hook was written: a bound method's function, what a `functools.partial` calls."""
    inside = getattr(hook, "func", hook)
    return f"{getattr(inside, '__module__', None) or type(inside).__module__}."


def _refuse(name: str, how: str, hook: Any, num_passes: int) -> None:
    inside = getattr(hook, "func", hook)
    what = getattr(inside, "__qualname__", type(inside).__name__)
    raise UpdateError(
        f"parameter {name} has a hook ({how}: {what}), which backward would call {num_passes} times for this batch, each time "
        "with one micro-batch's part of the gradient instead of once with all of it. Remove it (handle.remove()) and do the "
        "same to .grad when all of it is there: accumulator.backward(batch), then your function, then optimizer.step(). "
        "Update clips by itself (clip_norm=, clip_value=) and steps the optimizer once, after the last micro-batch; an "
        "optimizer that steps in backward cannot accumulate."
    )

"""Gradient checkpointing of a model that somebody else wrote: whether it offers it, and turning it on without a trace."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from anybatch.errors import PlanError
from anybatch.torch_inside import NormLayer, call_hooks_of

_ABSENT = object()
_Entry = tuple[dict[str, Any], str, Any]
"""A table of attributes, a name in it, and what stands there."""


@dataclass(frozen=True, slots=True)
class Recomputing:
    """The blocks of one model, which keep their inputs only inside `on()` and run again in backward; as before after it."""

    blocks: str
    """Which they are, in words."""
    _inside: tuple[_Entry, ...]

    @contextmanager
    def on(self) -> Iterator[None]:
        """The block in which the model recomputes."""
        outside = [(table, name, table.get(name, _ABSENT)) for table, name, _ in self._inside]
        try:
            _write(self._inside)
            yield
        finally:
            _write(outside)


def recomputing_of(model: nn.Module) -> Recomputing:
    """How this model is checkpointed: by its own `gradient_checkpointing_enable`, or each block of its largest list as a whole.

    A model that repeats nothing, recomputes already, or would notice that a block runs twice is refused with the reason.
    """
    if getattr(model, "is_gradient_checkpointing", False):
        raise PlanError("it is on already")
    repeated = repeated_blocks(model)
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if repeated is None and enable is None:
        raise PlanError("the model has no list of blocks that have children, and no gradient_checkpointing_enable()")
    path, blocks = repeated or ("", [])
    _check_blocks(path, blocks)
    named = (
        f"the {len(blocks)} {type(blocks[0]).__name__} of {path or 'the model'}" if blocks else "the model's own way"
    )
    if callable(enable):
        try:
            return Recomputing(named, _changes_by(model, partial(_enable, enable)))
        except ValueError as error:  # transformers' models that do not support it
            if not blocks:
                raise PlanError(str(error)) from error
    return Recomputing(named, _changes_by(model, partial(_wrap, blocks)))


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
        for child in dict.fromkeys(module):
            if next(child.children(), None) is not None:
                kinds.setdefault(type(child), []).append(child)
        for blocks in kinds.values():
            weight = sum(parameter.numel() for block in blocks for parameter in block.parameters())
            if len(blocks) > 1 and (best is None or weight > best[0]):
                best = weight, path, blocks
    return None if best is None else (best[1], best[2])


def _check_blocks(path: str, blocks: list[nn.Module]) -> None:
    for index, block in enumerate(blocks):
        for name, module in block.named_modules(prefix=f"{path}.{index}".lstrip(".")):
            if isinstance(module, NormLayer) and module.track_running_stats:
                raise PlanError(f"{name} ({type(module).__name__}) would count its running statistics twice")
            if any(call_hooks_of(module)):
                raise PlanError(f"{name} has hooks on its forward, which would be called twice")


def _enable(enable: Callable[..., object]) -> None:
    takes_options = "gradient_checkpointing_kwargs" in signature(enable).parameters
    enable(**({"gradient_checkpointing_kwargs": {"use_reentrant": False}} if takes_options else {}))


def _wrap(blocks: list[nn.Module]) -> None:
    for block in blocks:
        vars(block)["forward"] = partial(checkpoint, block.forward, use_reentrant=False)


def _changes_by(model: nn.Module, switch_on: Callable[[], object]) -> tuple[_Entry, ...]:
    """What `switch_on` writes into attributes and tables of the modules; everything is put back before this returns."""
    tables = [table for module in model.modules() for table in (vars(module), *_dicts_in(module))]
    before = [dict(table) for table in tables]
    try:
        switch_on()
    finally:
        changed = [
            (table, name, was.get(name, _ABSENT), table.get(name, _ABSENT))
            for table, was in zip(tables, before, strict=True)
            for name in {**was, **table}
            if was.get(name, _ABSENT) is not table.get(name, _ABSENT)
        ]
        _write([(table, name, was) for table, name, was, _ in changed])
    return tuple((table, name, now) for table, name, _, now in changed)


def _dicts_in(module: nn.Module) -> list[dict[str, Any]]:
    return [value for value in vars(module).values() if isinstance(value, dict)]


def _write(entries: Iterable[_Entry]) -> None:
    for table, name, value in entries:
        if value is _ABSENT:
            table.pop(name, None)
        else:
            table[name] = value

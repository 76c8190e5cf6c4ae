"""`UpdateOptions`: the options that `Update`, `Accumulator`, `plan` and `verify` share, as one value."""

import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from functools import wraps
from inspect import signature
from typing import Any, Literal, ParamSpec, TypedDict, get_args

import torch

from anybatch.core.events import Observer
from anybatch.core.splits import Split
from anybatch.display import called, did_you_mean, name_of, one_of
from anybatch.errors import ArgumentsError, UpdateError

Autocast = torch.dtype | torch.autocast | None
"""A dtype to autocast the forward to, a `torch.autocast(...)` context, or None."""

BatchNorm = Literal["exact", "micro", "frozen"]
"""Statistics of BatchNorm layers in training: of the whole batch, of each micro-batch, or the running statistics."""

Check = Literal["off", "first"]
"""Check before the first batch is learnt from: none, or whether the losses of a few rows add up."""

Offload = Literal["auto", "host", "disk"] | None
"""Target of offloaded activations: `"host"`, `"disk"`, `"auto"` (offload once memory is half full), None for no offload."""

OnNonFinite = Literal["raise", "skip", "drop", "ignore"]
"""Policy for an inf or nan in the gradient."""

OnEmpty = Literal["skip", "step"]
"""Policy for a batch without any target: no update, or a step with zero gradients, which decays weights."""

Sums = Literal["fp32", "param", "auto"]
"""Dtype that gradients of bf16 and fp16 parameters are summed in; `"auto"` is fp32 if it fits, else their own."""

Reduction = Literal["mean", "sum"]
"""Reduction of a loss over its units."""

Arguments = ParamSpec("Arguments")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateOptions:
    """Options of an update, as one value that `Update`, `Accumulator`, `plan` and `verify` share.

    Args:
        autocast: A dtype to autocast the forward to, such as torch.bfloat16, or a `torch.autocast(...)` context.
        batch_norm: Statistics of BatchNorm layers in training. "exact": of the whole batch. "micro": of each micro-batch, with
            the running statistics updated once per batch. "frozen": the running statistics. None is "micro" with one warning.
        offload: Target of the activations that "exact" holds: "host" memory, "disk", None for no offload, or "auto", which
            offloads once half of the free memory is used.
        reshard: False keeps FSDP2 parameters gathered from one micro-batch to the next: fewer all-gathers, more memory.
        prefetch: Copy the next micro-batch from pinned memory to the accelerator while one runs.
        on_nonfinite: Policy for an inf or nan in the gradient. "raise": an error that names parameter and micro-batch. "skip":
            no update. "drop": leave the micro-batch out and renormalise the rest. "ignore": do not check.
        on_empty: Policy for a batch without targets. "skip": no update. "step": step with zeros, which decays weights.
        clip_norm: Largest norm of the gradient of the whole batch.
        clip_value: Largest absolute value of each entry of the gradient; not together with `clip_norm`.
        noise: Measure the gradient noise scale in one update of this many.
        sums: Dtype that gradients of bf16 and fp16 parameters are summed in: "fp32", "param" (their own dtype: half the
            memory, rounded after each micro-batch), or "auto" (chosen by `Fit`).

    Raises:
        UpdateError: If a value is not one of these, or both `clip_norm` and `clip_value` are given.

    Example:
        >>> UpdateOptions(clip_norm=1.0, noise=8).given()
        {'clip_norm': 1.0, 'noise': 8}
    """

    autocast: Autocast = None
    batch_norm: BatchNorm | None = None
    offload: Offload = "auto"
    reshard: bool = True
    prefetch: bool = False
    on_nonfinite: OnNonFinite = "raise"
    on_empty: OnEmpty = "skip"
    clip_norm: float | None = None
    clip_value: float | None = None
    noise: int | None = None
    sums: Sums = "fp32"

    def __post_init__(self) -> None:
        if self.autocast is not None and not isinstance(self.autocast, torch.dtype | AbstractContextManager):
            raise UpdateError(
                f"autocast={self.autocast!r}: expected a dtype, such as torch.bfloat16, a torch.autocast(...) of your own, "
                "or None."
            )
        if self.batch_norm is not None and self.batch_norm not in get_args(BatchNorm):
            choices = one_of(self.batch_norm, get_args(BatchNorm), or_none=True)
            raise UpdateError(f"batch_norm={self.batch_norm!r}: {choices}")
        if self.offload is not None and self.offload not in get_args(get_args(Offload)[0]):
            hint = did_you_mean(self.offload, ("auto", "host", "disk")) or "."
            raise UpdateError(f"offload={self.offload!r}: expected 'auto', 'host', 'disk' or None{hint}")
        for name, kind in (("on_nonfinite", OnNonFinite), ("on_empty", OnEmpty), ("sums", Sums)):
            value = getattr(self, name)
            if value not in get_args(kind):
                raise UpdateError(f"{name}={value!r}: {one_of(value, get_args(kind))}")
        if self.clip_norm is not None and self.clip_value is not None:
            raise UpdateError(
                f"clip_norm={self.clip_norm} and clip_value={self.clip_value} are both given; choose one."
            )
        for name, size in (("clip_norm", self.clip_norm), ("clip_value", self.clip_value)):
            if size is not None and (not isinstance(size, int | float) or not size > 0):
                raise UpdateError(f"{name}={size!r}: expected a number above 0, or None for no clipping.")
        if self.noise is not None and (
            isinstance(self.noise, bool) or not isinstance(self.noise, int) or self.noise < 1
        ):
            raise UpdateError(
                f"noise={self.noise!r}: expected a whole number, such as 8 to measure one update in 8, or None."
            )

    def sums_fp32(self, split: Split) -> bool:
        """Return True if gradients are summed in fp32; for "auto", `split` chooses."""
        return (split.sums if self.sums == "auto" else self.sums) == "fp32"

    @property
    def drops(self) -> bool:
        """True if a non-finite micro-batch is left out of the batch."""
        return self.on_nonfinite == "drop"

    def given(self) -> dict[str, Any]:
        """Return the options that differ from their defaults."""
        held = ((field, getattr(self, field.name)) for field in fields(self))
        return {field.name: value for field, value in held if value != field.default}


Running = UpdateOptions
"""Former name of `UpdateOptions`."""


class MoreOptions(TypedDict, total=False):
    """Keywords of `Update` and `Accumulator` that are not in their signatures; `running` is the former name of `options`."""

    clip_value: float | None
    offload: Offload
    on_empty: OnEmpty
    reshard: bool
    prefetch: bool
    noise: int | None
    sums: Sums
    observer: Observer | None
    running: UpdateOptions | None


def options_of(options: UpdateOptions | None, spelled: Mapping[str, Any], more: Mapping[str, Any]) -> UpdateOptions:
    """Merge `options=` with single keywords, which win: `spelled` ones unless they are None, and all of `more`."""
    base = options or more.get("running") or UpdateOptions()
    if not isinstance(base, UpdateOptions):
        raise UpdateError(
            f"options={base!r:.80} is a {type(base).__name__}; expected UpdateOptions(clip_norm=1.0, ...)."
        )
    known = {field.name for field in fields(UpdateOptions)}
    given = {name: value for name, value in spelled.items() if value is not None}
    given |= {name: value for name, value in more.items() if name in known}
    return replace(base, **given) if given else base


def check_of(check: Check | Literal["full"] | bool) -> Check:
    """Read `check=`: False is "off"; True and "full" are "first", with a deprecation warning."""
    if check is False:
        return "off"
    if check is True or check == "full":
        warnings.warn(
            f"check={check!r} is check='first' by now: it looks at the losses of a few rows. Call verify(model, objective, "
            "batch) to compare gradients.",
            DeprecationWarning,
            stacklevel=4,  # the caller of Update()
        )
        return "first"
    if check not in get_args(Check):
        raise UpdateError(f"check={check!r}: False is 'off'; {one_of(check, get_args(Check))}")
    return check


def checks_arguments(init: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """Decorate the `__init__` of `Update` or `Accumulator`: a missing or unknown argument is an error that names the fix."""
    known = [*dict.fromkeys([*signature(init).parameters, *MoreOptions.__annotations__])]
    known.remove("more")

    @wraps(init)
    def checked(*args: Arguments.args, **options: Arguments.kwargs) -> None:
        who = type(args[0]).__name__
        for name in options:
            if name not in known:
                raise ArgumentsError(f"{who}() has no argument {name!r}{did_you_mean(name, known) or '.'}")
        if "micro_batch" not in options:
            raise ArgumentsError(
                f"{who}() needs micro_batch: what one forward and backward holds in memory. Write micro_batch=16 for at most "
                '16 rows, or micro_batch="auto" for the fastest that fits; Tokens(8192) cuts ragged rows, Fit("6GiB") by '
                "memory."
            )
        init(*args, **options)

    return checked


def repr_of(runs: Any, name: str = "Accumulator", optimizer: Any = None) -> str:
    """Format `Accumulator(Net, Objective(loss), micro_batch=Rows(size=16))`, with the split in use now."""
    named = [name_of(part) for part in (runs.model, optimizer) if part is not None]
    return called(name, *named, repr(runs.objective), micro_batch=runs.split, **runs.options.given())


class Option:
    """Attribute that reads and sets one field of its owner's `options`."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else getattr(instance.options, self._name)

    def __set__(self, instance: Any, value: Any) -> None:
        instance.options = replace(instance.options, **{self._name: value})

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
"""A dtype to autocast to on the model's device, or an autocast context of the user's own; None for none."""

BatchNorm = Literal["exact", "micro", "frozen"]
"""What BatchNorm layers in training see: the whole batch, each micro-batch for itself, or their running statistics."""

Check = Literal["off", "first"]
"""What an update looks at before it learns from its first batch: nothing, or the losses of a few rows."""

Offload = Literal["auto", "host", "disk"] | None
"""Where saved tensors go: to `"host"` memory, to `"disk"`, `"auto"`: out once memory is half full; None: they stay."""

OnNonFinite = Literal["raise", "skip", "drop", "ignore"]
"""What an inf or nan in the gradient does to the update."""

OnEmpty = Literal["skip", "step"]
"""What a batch without any target is: no update, or one with a gradient of zeros, which decays weights and moves averages."""

Sums = Literal["fp32", "param", "auto"]
"""What gradients of bf16 and fp16 parameters are summed in: fp32, their own dtype, or that only where fp32 does not fit."""

Reduction = Literal["mean", "sum"]
"""How a loss puts its units together."""


Arguments = ParamSpec("Arguments")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateOptions:
    """How an update runs, as one value that `Update`, `Accumulator`, `plan` and `verify` share.

    Args:
        autocast: A dtype to autocast the forward to, such as torch.bfloat16, or a `torch.autocast` of your own.
        batch_norm: What BatchNorm layers in training see: "exact", the whole batch; "micro", each micro-batch, with running
            statistics merged to one update; "frozen", the running statistics. None is "micro" with one warning.
        offload: Where "exact" keeps what its graphs save: "host" memory, "disk", None for in place, or "auto": in place up to
            half of the free memory, then out.
        reshard: False keeps FSDP2 parameters gathered from one micro-batch to the next: fewer all-gathers, more memory.
        prefetch: Copy the next micro-batch from pinned memory to the accelerator while one runs.
        on_nonfinite: What an inf or nan in the gradient does: "raise" names parameter and micro-batch, "skip" leaves the
            update out, "drop" leaves the micro-batch out and renormalises the rest, "ignore" never looks.
        on_empty: "skip": a batch without targets is no update. "step": it steps with zeros, which decays weights.
        clip_norm: Clip the gradient to this norm.
        clip_value: Clamp every entry of the gradient to this size; not together with `clip_norm`.
        noise: Measure the gradient noise scale in one update of this many.
        sums: What gradients of bf16 and fp16 parameters are summed in: "fp32", "param" (their own dtype: half the memory, and
            an error), or "auto" (what `Fit` chooses).

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
        """True if gradients are summed in fp32. A split that knows the memory chooses for "auto"."""
        return (split.sums if self.sums == "auto" else self.sums) == "fp32"

    @property
    def drops(self) -> bool:
        """True if single micro-batches that are not finite are left out."""
        return self.on_nonfinite == "drop"

    def given(self) -> dict[str, Any]:
        """Return the options that differ from their defaults."""
        held = {field.name: getattr(self, field.name) for field in fields(self)}
        return {field.name: held[field.name] for field in fields(self) if held[field.name] != field.default}


Running = UpdateOptions
"""The name of `UpdateOptions` before it was public."""


class MoreOptions(TypedDict, total=False):
    """Keywords that `Update` and `Accumulator` take beside those that they spell out: fields of `UpdateOptions`, and others."""

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
    """Join `options=` with single keywords, which win: those spelled out where they are not None, all of `more`."""
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
            stacklevel=4,  # whoever made the Update
        )
        return "first"
    if check not in get_args(Check):
        raise UpdateError(f"check={check!r}: False is 'off'; {one_of(check, get_args(Check))}")
    return check


def checks_arguments(init: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """Decorate the `__init__` of `Update` or `Accumulator`: a missing or unknown argument is an error that names the fix."""
    spelled = signature(init).parameters
    known = [name for name in spelled if name != "more"] + [
        name for name in MoreOptions.__annotations__ if name not in spelled
    ]

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
    """Write `Accumulator(Net, Objective(loss), micro_batch=Rows(size=16))`: what it was made of, and cuts by now."""
    named = [name_of(runs.model), *([] if optimizer is None else [name_of(optimizer)]), repr(runs.objective)]
    return called(name, *named, micro_batch=runs.split, **runs.options.given())


class Option:
    """An attribute of an object that has `options`: that option of it, read and set."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else getattr(instance.options, self._name)

    def __set__(self, instance: Any, value: Any) -> None:
        instance.options = replace(instance.options, **{self._name: value})

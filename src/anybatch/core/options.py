"""How updates run: the options that `Update`, `Accumulator`, `plan`, `verify` and `Fit` have in common, as one value."""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from functools import wraps
from inspect import signature
from typing import Any, Literal, ParamSpec, get_args

import torch

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
class Running:
    """The options of an update. They are explained in `Update` and `Accumulator`."""

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
        check_offload(self.offload)
        if self.on_nonfinite not in get_args(OnNonFinite):
            raise UpdateError(f"on_nonfinite={self.on_nonfinite!r}: {one_of(self.on_nonfinite, get_args(OnNonFinite))}")
        if self.on_empty not in get_args(OnEmpty):
            raise UpdateError(f"on_empty={self.on_empty!r}: {one_of(self.on_empty, get_args(OnEmpty))}")
        if self.sums not in get_args(Sums):
            raise UpdateError(f"sums={self.sums!r}: {one_of(self.sums, get_args(Sums))}")
        if self.clip_norm is not None and self.clip_value is not None:
            raise UpdateError(
                f"clip_norm={self.clip_norm} and clip_value={self.clip_value} are both given; choose one."
            )
        for name, value in (("clip_norm", self.clip_norm), ("clip_value", self.clip_value)):
            if value is not None and (not isinstance(value, int | float) or not value > 0):
                raise UpdateError(f"{name}={value!r}: expected a number above 0, or None for no clipping.")
        if self.noise is not None and (
            isinstance(self.noise, bool) or not isinstance(self.noise, int) or self.noise < 1
        ):
            raise UpdateError(
                f"noise={self.noise!r}: expected a whole number, such as 8 to measure one update in 8, or None."
            )

    def sums_fp32(self, split: Split) -> bool:
        """True where gradients are summed in fp32; "auto" is what a split that knows the memory has chosen, else fp32."""
        return (split.sums if self.sums == "auto" else self.sums) == "fp32"

    @property
    def drops(self) -> bool:
        """True where single micro-batches that are not finite are left out."""
        return self.on_nonfinite == "drop"

    def given(self) -> dict[str, Any]:
        """The options that are not what they are by default."""
        held = {field.name: getattr(self, field.name) for field in fields(self)}
        return {field.name: held[field.name] for field in fields(self) if held[field.name] != field.default}


def check_offload(offload: object) -> None:
    """Refuse what is no place."""
    if offload is not None and offload not in get_args(get_args(Offload)[0]):
        hint = did_you_mean(offload, ("auto", "host", "disk")) or "."
        raise UpdateError(f"offload={offload!r}: expected 'auto', 'host', 'disk' or None{hint}")


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


def says_what_to_write(init: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """The `__init__` of what runs in micro-batches: an argument that it misses, or does not know, is told with the fix."""
    known = signature(init).parameters

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


def in_a_line(runs: Any, name: str = "Accumulator", optimizer: Any = None) -> str:
    """`Accumulator(Net, Objective(loss), micro_batch=Rows(size=16))`: what it was made of, and cuts by now."""
    named = [name_of(runs.model), *([] if optimizer is None else [name_of(optimizer)]), repr(runs.objective)]
    return called(name, *named, micro_batch=runs.split, **runs.running.given())


class Option:
    """An attribute of an object that has `running`: that option of it, read and set."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else getattr(instance.running, self._name)

    def __set__(self, instance: Any, value: Any) -> None:
        instance.running = replace(instance.running, **{self._name: value})

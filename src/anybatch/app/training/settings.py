"""Settings of a training run, checked before torch is loaded."""

import re
from dataclasses import dataclass
from typing import Any, Literal, get_args

from anybatch.display import one_of, parse_bytes
from anybatch.errors import SettingsError

LRRule = Literal["none", "linear", "sqrt"]
Decay = Literal["none", "linear", "cosine"]
Precision = Literal["fp32", "bf16", "fp16"]
Parallel = Literal["ddp", "fsdp2"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Options of the command line; None takes the task's value."""

    batch_size: int | None = None
    micro_batch: int | Literal["auto"] | None = None
    memory: int | None = None  # bytes that an update may take; sets the micro-batch
    epochs: int | None = None
    updates: int | None = None  # instead of `epochs`
    lr: float | None = None
    lr_rule: LRRule | None = None
    base_batch: int | None = None  # batch size that the learning rate was chosen for
    keep_half_life: bool = True  # scale Adam's beta2 with the learning rate
    warmup: int | None = None
    decay: Decay | None = None
    clip_norm: float | None = None
    precision: Precision = "fp32"
    seed: int = 0
    device: str = "auto"
    parallel: Parallel = "ddp"  # ignored in one process
    noise: int | None = None  # updates between two measurements of the gradient's noise
    save_every: int | None = None  # updates between two checkpoints; None: each epoch and each minute
    keep: int = 3  # number of checkpoints

    def __post_init__(self) -> None:
        if self.micro_batch != "auto":
            _check_whole("micro_batch", self.micro_batch, least=1)
        for name in ("batch_size", "memory", "epochs", "updates", "base_batch", "noise", "save_every", "keep"):
            _check_whole(name, getattr(self, name), least=1)
        _check_whole("warmup", self.warmup, least=0)
        _check_whole("seed", self.seed, least=0, most=2**64 - 1)
        for name in ("lr", "clip_norm"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise SettingsError(f"{_option(name)} {value!r}: expected a number above 0, such as 0.1.")
        for name, choices in (("lr_rule", LRRule), ("decay", Decay), ("precision", Precision), ("parallel", Parallel)):
            value = getattr(self, name)
            if value is not None and value not in get_args(choices):
                raise SettingsError(f"{_option(name)} {value!r}: {one_of(value, get_args(choices))}")
        if self.epochs is not None and self.updates is not None:
            raise SettingsError(
                f"--epochs {self.epochs} and --updates {self.updates} both say how long to train; give one of them."
            )


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    bytes: int


def parse_micro_batch(text: str) -> int | Literal["auto"] | MemoryLimit:
    """Parse rows (`16`), `auto`, or a memory size (`2GiB`, `800MB`).

    >>> parse_micro_batch("16"), parse_micro_batch("auto"), parse_micro_batch("1.5GiB")
    (16, 'auto', MemoryLimit(bytes=1610612736))
    """
    word = text.strip()
    if word.lower() == "auto":
        return "auto"
    if re.fullmatch(r"\d+", word) and int(word) > 0:
        return int(word)
    try:
        return MemoryLimit(parse_bytes(word))
    except SettingsError:
        raise SettingsError(
            f"--micro-batch {text!r}: expected a number of rows, 1 or more (16), auto, or a memory size with its unit "
            "(2GiB, 800MB)."
        ) from None


def _check_whole(name: str, value: Any, least: int, most: int | None = None) -> None:
    if value is None:
        return
    if most is not None and isinstance(value, int) and value > most:
        raise SettingsError(f"{_option(name)} {value!r}: expected a whole number, {most} at most.")
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SettingsError(f"{_option(name)} {value!r}: expected a whole number, {least} or more.")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")

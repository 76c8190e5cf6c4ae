"""Loaders and their epochs, BatchNorm, train and eval, DDP and FSDP2's switches."""

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from anybatch.core import BatchNormLayer, DropoutLayer
from anybatch.doctor.recording.tape import Patches, Tape, around, here, nothing
from anybatch.parallel import sharded_kind

CHANNELS = 8
"""Channels of the first BatchNorm whose statistics are written down."""
MARKED = 4096
"""Numbers of a batch by which it is known again on another rank."""


def install_data_watch(tape: Tape, patches: Patches) -> None:
    """From now on epochs and forwards are seen."""
    _Loaders(tape).install(patches)
    modules = _Modules(tape)
    safely = tape.safely
    patches.replace(BatchNormLayer, "forward", around(safely(modules.normalised), nothing))
    patches.replace(nn.Module, "train", around(nothing, safely(modules.trained)))
    patches.replace(DistributedDataParallel, "forward", around(safely(modules.spread), nothing))

    def late(*_: Any, **__: Any) -> None:
        """FSDP2 is imported after torch, and before the optimizer is made."""
        kind: Any = sharded_kind()
        if kind is not None and not hasattr(kind.set_requires_gradient_sync, "is_doctors"):
            patches.replace(kind, "set_requires_gradient_sync", around(nothing, safely(modules.switched)))

    patches.replace(Optimizer, "__init__", around(nothing, safely(late)))


class _Loaders:
    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.numbers: dict[int, tuple[Any, int, int]] = {}

    def install(self, patches: Patches) -> None:
        short = self.tape.watch.short_epochs
        kind: Any = DataLoader

        def make(original: Any) -> Any:
            def begin(loader: Any) -> Any:
                iterator = original(loader)
                if self.tape.is_ended or self.tape.is_broken:
                    return iterator
                epoch = self.tape.safely(self._begun)(loader)
                is_stream = self._whole(loader) is None  # it may have no end, and whoever reads it may count on that
                return Fetching(iterator, self.tape, epoch, 0 if is_stream else short)

            return begin

        def make_length(original: Any) -> Any:
            def length(loader: Any) -> int:
                whole: int = original(loader)
                return min(whole, short) if short and not self.tape.is_ended else whole

            return length

        self._length = kind.__len__
        patches.replace(kind, "__iter__", make)
        patches.replace(kind, "__len__", make_length)

    def _begun(self, loader: Any) -> list[int]:
        known = self.numbers.get(id(loader))
        if known is None or known[0]() is not loader:
            known = (weakref.ref(loader), len(self.numbers), 0)
        known = (known[0], known[1], known[2] + 1)
        self.numbers[id(loader)] = known
        whole = self._whole(loader)
        self.tape.write("epoch", loader=known[1], number=known[2], whole=whole, **_sampling(loader), place=here())
        return [known[1], known[2]]

    def _whole(self, loader: Any) -> int | None:
        """Its batches; None of a stream that does not say."""
        try:
            return int(self._length(loader))
        except TypeError:
            return None


def _sampling(loader: Any) -> dict[str, Any]:
    sampler = getattr(loader, "sampler", None)
    facts: dict[str, Any] = {"batch_size": loader.batch_size, "sampler": type(sampler).__name__}
    try:
        facts["dataset"] = len(loader.dataset)
    except (TypeError, NotImplementedError):
        return facts
    if isinstance(sampler, DistributedSampler):
        facts |= {"replicas": sampler.num_replicas, "dealt": sampler.total_size, "drop_last": sampler.drop_last}
    facts["is_plain"] = type(sampler) in (RandomSampler, SequentialSampler) and type(loader) is DataLoader
    batches: Any = getattr(loader, "batch_sampler", None)
    if type(batches).__name__ == "BatchSamplerShard":
        facts |= {"replicas": batches.num_processes, "is_even": bool(getattr(batches, "even_batches", False))}
        facts["is_plain"] = False
    if isinstance(sampler, RandomSampler) and sampler.replacement:
        facts["replacement"] = True
    return facts


class Fetching:
    """A loader's iterator that tells which batch was fetched, and may end early."""

    def __init__(self, inner: Any, tape: Tape, epoch: list[int] | None, short: int) -> None:
        self._inner, self._tape, self._epoch, self._short, self._fetched = inner, tape, epoch or [-1, 0], short, 0
        self._is_dealt = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        whole = len(self._inner)
        return min(whole, self._short) if self._short else whole

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __next__(self) -> Any:
        try:
            if self._short and self._fetched >= self._short:
                raise StopIteration
            batch = next(self._inner)
        except StopIteration:
            self._tape.safely(self._tape.write)(
                "epoch-end", loader=self._epoch[0], number=self._epoch[1], fetched=self._fetched
            )
            raise
        self._tape.current["batch"] = [*self._epoch, self._fetched]
        self._tape.current["rows"] = _num_rows(batch)
        if self._is_dealt:
            self._tape.current["mark"] = self._tape.safely(_mark)(batch)
        self._fetched += 1
        return batch


def _mark(batch: Any) -> float | None:
    """A number that hardly two batches share, and the same rows always have."""
    if isinstance(batch, Tensor):
        flat = batch.detach().reshape(-1)[:MARKED].double()
        return float((flat * torch.arange(1, len(flat) + 1, dtype=flat.dtype, device=flat.device)).sum())
    inner = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return next((mark for mark in map(_mark, inner) if mark is not None), None)


def _num_rows(batch: Any) -> int | None:
    if isinstance(batch, Tensor):
        return int(batch.shape[0]) if batch.dim() else None
    inner = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return next((rows for rows in map(_num_rows, inner) if rows is not None), None)


class _Modules:
    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.first: Any = None

    def normalised(self, layer: Any, batch: Tensor, *_: Any, **__: Any) -> None:
        if not layer.training or not torch.is_tensor(batch) or self.tape.depth:
            return
        current = self.tape.current
        current["norm_forwards"] = current.get("norm_forwards", 0) + 1
        if self.first is None or self.first() is None:
            self.first = weakref.ref(layer)
        if self.first() is layer and "norms" not in current and batch.dim() >= 2:
            rows = batch.detach()[:, :CHANNELS].transpose(0, 1).reshape(min(CHANNELS, batch.shape[1]), -1).double()
            current["norms"] = {
                "mean": rows.mean(1).tolist(),
                "var": rows.var(1, unbiased=False).tolist(),
                "count": rows.shape[1],
                "momentum": layer.momentum,
                "batch": True,
            }

    def trained(self, _: Any, module: nn.Module, mode: bool = True, *__: Any, **___: Any) -> None:
        if here().function and _calls_itself():
            return
        cares = any(isinstance(child, DropoutLayer | BatchNormLayer) for child in module.modules())
        if cares:
            self.tape.current["is_eval"] = not mode

    def spread(self, module: Any, *_: Any, **__: Any) -> None:
        if (module.training and torch.is_grad_enabled()) or module.training:
            self.tape.current["sync"] = bool(module.require_backward_grad_sync)
            self.tape.current["ddp"] = weakref.ref(module)

    def switched(self, _: Any, module: Any, flag: bool, *__: Any, **___: Any) -> None:
        self.tape.current["fsdp"] = bool(flag)


def _calls_itself() -> bool:
    """`train` calls itself for every child."""
    import sys

    frame = sys._getframe(1)
    count = 0
    for _ in range(24):
        if frame.f_code.co_name == "train" and frame.f_code.co_filename.endswith("module.py"):
            count += 1
        if frame.f_back is None:
            break
        frame = frame.f_back
    return count > 0

"""Record loaders and their epochs, BatchNorm, train and eval mode, and the synchronisation switches of DDP and FSDP2."""

import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from anybatch.core import BatchNormLayer, DropoutLayer, tensors
from anybatch.doctor.recording.event_log import EventLog, here, is_called_by
from anybatch.parallel import sharded_kind

CHANNELS = 8
"""Channels of the first BatchNorm with logged statistics."""
MARKED = 4096
"""Elements of a batch in its checksum."""


def install_data_watch(log: EventLog) -> None:
    """Patch loaders, BatchNorm, `Module.train`, DDP and FSDP2."""
    _LoaderWatch(log)
    _watch_norms(log)
    _watch_switches(log)


class _LoaderWatch:
    def __init__(self, log: EventLog) -> None:
        self.log = log
        self.numbers: dict[int, tuple[Any, int, int]] = {}
        short = log.watch.short_epochs
        kind: Any = DataLoader
        self._length = kind.__len__

        def make(original: Any) -> Any:
            def begin(loader: Any) -> Any:
                iterator = original(loader)
                if log.is_ended or log.is_broken:
                    return iterator
                epoch = log.safely(self._begun)(loader)
                is_stream = self._whole(loader) is None  # it may be endless, and its reader may count on that
                return WatchedIterator(iterator, log, epoch, 0 if is_stream else short)

            return begin

        def make_length(original: Any) -> Any:
            def length(loader: Any) -> int:
                whole: int = original(loader)
                return min(whole, short) if short and not log.is_ended else whole

            return length

        log.patch(kind, "__iter__", make)
        log.patch(kind, "__len__", make_length)

    def _begun(self, loader: Any) -> list[int]:
        known = self.numbers.get(id(loader))
        if known is None or known[0]() is not loader:
            known = (weakref.ref(loader), len(self.numbers), 0)
        reference, number, epoch = known
        self.numbers[id(loader)] = (reference, number, epoch + 1)
        whole = self._whole(loader)
        self.log.write("epoch", loader=number, number=epoch + 1, whole=whole, **_sampling(loader), place=here())
        return [number, epoch + 1]

    def _whole(self, loader: Any) -> int | None:
        """Return the number of batches; None for a stream without a length."""
        try:
            return int(self._length(loader))
        except TypeError:
            return None


def _sampling(loader: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {"batch_size": loader.batch_size}
    try:
        facts["dataset"] = len(loader.dataset)
    except (TypeError, NotImplementedError):
        return facts
    sampler, batches = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
    if isinstance(sampler, DistributedSampler):
        facts["dealt"] = sampler.total_size
    facts["is_plain"] = type(sampler) in (RandomSampler, SequentialSampler) and type(loader) is DataLoader
    if type(batches).__name__ == "BatchSamplerShard":  # Accelerate's
        facts |= {"is_even": bool(getattr(batches, "even_batches", False)), "is_plain": False}
    return facts


class WatchedIterator:
    """Iterator of a loader that notes which batch was fetched, and ends after `short` batches unless that is 0."""

    def __init__(self, inner: Any, log: EventLog, epoch: list[int] | None, short: int) -> None:
        self._inner, self._log, self._epoch, self._short, self._fetched = inner, log, epoch or [-1, 0], short, 0
        self._has_ranks = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1

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
            number, epoch = self._epoch
            self._log.safely(self._log.write)("epoch-end", loader=number, number=epoch, fetched=self._fetched)
            raise
        self._log.safely(self._note)(batch)
        self._fetched += 1
        return batch

    def _note(self, batch: Any) -> None:
        current, found = self._log.current, list(tensors(batch))
        current["batch"] = [*self._epoch, self._fetched]
        current["rows"] = next((len(tensor) for tensor in found if tensor.dim()), None)
        if self._has_ranks:
            current["mark"] = _checksum(found[0]) if found else None


def _checksum(tensor: Tensor) -> float:
    flat = tensor.detach().reshape(-1)[:MARKED].double()
    return float((flat * torch.arange(1, len(flat) + 1, dtype=flat.dtype, device=flat.device)).sum())


def _watch_norms(log: EventLog) -> None:
    measured: list[weakref.ref[Any]] = []  # the one layer with logged statistics

    def normalised(layer: Any, batch: Tensor, *_: Any, **__: Any) -> None:
        if not layer.training or not torch.is_tensor(batch) or log.depth:
            return
        current = log.current
        current["norm_forwards"] = current.get("norm_forwards", 0) + 1
        if not measured or measured[0]() is None:
            measured[:] = [weakref.ref(layer)]
        is_measured = measured[0]() is layer
        if is_measured and "norms" not in current and batch.dim() >= 2:
            rows = batch.detach()[:, :CHANNELS].transpose(0, 1).reshape(min(CHANNELS, batch.shape[1]), -1).double()
            current["norms"] = {
                "mean": rows.mean(1).tolist(),
                "var": rows.var(1, unbiased=False).tolist(),
                "count": rows.shape[1],
                "momentum": layer.momentum,
            }

    log.around(BatchNormLayer, "forward", before=normalised)


def _watch_switches(log: EventLog) -> None:
    def trained(_: Any, module: nn.Module, mode: bool = True, *__: Any, **___: Any) -> None:
        if here().function and is_called_by("train", "module.py"):
            return  # Module.train calls itself for every child
        if any(isinstance(child, DropoutLayer | BatchNormLayer) for child in module.modules()):
            log.current["is_eval"] = not mode

    def ran_ddp(module: Any, *_: Any, **__: Any) -> None:
        if module.training:
            log.current["sync"] = bool(module.require_backward_grad_sync)
            log.current["ddp"] = weakref.ref(module)

    def switched_fsdp(_: Any, module: Any, flag: bool, *__: Any, **___: Any) -> None:
        log.current["fsdp"] = bool(flag)

    def watch_fsdp(*_: Any, **__: Any) -> None:
        """Patch FSDP2, which is imported after torch and before the optimizer is made."""
        kind: Any = sharded_kind()
        if kind is not None and not hasattr(kind.set_requires_gradient_sync, "is_doctors"):
            log.around(kind, "set_requires_gradient_sync", after=switched_fsdp)

    log.around(nn.Module, "train", after=trained)
    log.around(DistributedDataParallel, "forward", before=ran_ddp)
    log.around(Optimizer, "__init__", after=watch_fsdp)

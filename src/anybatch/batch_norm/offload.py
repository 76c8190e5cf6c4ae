"""Offload saved tensors to the host's memory or to disk until backward needs them."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from anybatch.core import (
    NOTHING,
    Offload,
    StorageWeakRef,
    TensorFile,
    free_on_device,
    free_on_host,
    is_dynamo_loaded,
    storage_behind,
    storage_cdata,
    version_of,
)
from anybatch.errors import UpdateError

SMALLEST = 16 * 1024
"""Bytes below which a tensor stays: moving it costs more than it saves."""
_PLAIN = (Tensor, torch.nn.Parameter)

Load = Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class _Kept:
    storage: StorageWeakRef
    version: int
    load: Load


class SavedTensors:
    """Offloads the tensors that a graph saves. Enter `hooks()` around the forwards, in each thread; exit after backward.

    Parameters, buffers and the batch itself (`stay`) are alive anyway and stay where they are. A storage that several
    operations save is offloaded once per version of its contents.
    """

    def __init__(self, offload: Offload, stay: Iterable[Tensor], device: torch.device, file: TensorFile) -> None:
        self._offload = offload
        self._file = file
        self._stay = {storage_cdata(tensor.untyped_storage()) for tensor in stay if type(tensor) in _PLAIN}
        self._budget = 0
        """Bytes that may stay with `offload="auto"`: half of the free memory, none if the system does not say."""
        if offload == "auto":
            self._budget = (free_on_device(device) if device.type != "cpu" else free_on_host() or 0) // 2
        self._kept: dict[int, _Kept] = {}
        if offload == "host" and device.type == "cpu":
            raise UpdateError(
                "offload='host' moves tensors from an accelerator to the host, but the model is on the CPU: they are there "
                "already. Use offload='disk', or 'auto'."
            )

    def __enter__(self) -> "SavedTensors":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._kept.clear()
        if kind is None:
            self._file.rewind()
        else:
            self._file.close()

    def hooks(self) -> AbstractContextManager[object]:
        """Return the context in which the graph of this thread saves its tensors here."""
        if self._offload is None:
            return NOTHING
        if is_dynamo_loaded():  # something may be compiled, and the hooks must not be compiled into it
            return saved_tensors_hooks(torch.compiler.disable(self._pack), torch.compiler.disable(_unpack))
        return saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, tensor: Tensor) -> Load:
        if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.nbytes < SMALLEST:
            return _in_place(tensor)
        storage, version = tensor.untyped_storage(), version_of(tensor)
        key, num_bytes = storage_cdata(storage), storage.nbytes()
        if key in self._stay or num_bytes > 2 * tensor.nbytes:
            return _in_place(tensor)
        kept = self._kept.get(key)
        if kept is None or kept.version != version:
            if self._budget >= num_bytes:
                self._budget -= num_bytes
                return _in_place(tensor)
            self._kept = {key: one for key, one in self._kept.items() if not one.storage.expired()}
            # the weak reference holds the storage's address: no other storage can be taken for this one
            kept = _Kept(StorageWeakRef(storage), version, self._put(storage, tensor.device))
            self._kept[key] = kept
        load, dtype, size, stride, offset = (
            kept.load,
            tensor.dtype,
            tensor.size(),
            tensor.stride(),
            tensor.storage_offset(),
        )

        def view() -> Tensor:
            flat = load()
            return torch.empty(0, dtype=dtype, device=flat.device).set_(
                flat.untyped_storage(), int(offset), size, stride
            )

        return view

    def _put(self, storage: torch.UntypedStorage, device: torch.device) -> Load:
        flat = _bytes_of(storage)
        if device.type != "cpu":
            host = torch.empty(flat.shape, dtype=torch.uint8, pin_memory=True)
            if self._offload != "disk":
                host.copy_(flat, non_blocking=True)
                return _shared(lambda: host.to(device, non_blocking=True))
            host.copy_(flat)
            flat = host
        place = self._file.write(flat)
        return _shared(lambda: self._file.read(*place).to(device))


def _unpack(load: Load) -> Tensor:
    return load()


def _shared(read: Load) -> Load:
    """Return a function that reads, or returns what it read before if that is still alive."""
    last: StorageWeakRef | None = None

    def load() -> Tensor:
        nonlocal last
        storage = None if last is None else storage_behind(last)
        if storage is not None:
            return _bytes_of(storage)
        flat = read()
        last = StorageWeakRef(flat.untyped_storage())
        return flat

    return load


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _in_place(saved: Tensor) -> Load:
    """Keep a saved tensor where it is, and check its version, as torch does for tensors that no hook packed.

    The tensor is detached. With its graph the two would hold each other, and a batch that failed would never be freed.
    """
    tensor, version = saved.detach(), version_of(saved)

    def load() -> Tensor:
        if version_of(tensor) != version:
            raise RuntimeError(
                f"a tensor of shape {tuple(tensor.shape)} that backward needs was modified by an inplace operation: it is "
                f"at version {version_of(tensor)}, expected {version}. Use the operation that returns a new tensor."
            )
        return tensor

    return load

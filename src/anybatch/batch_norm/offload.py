"""Offload saved tensors to the host's memory, or to disk, until backward needs them."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from anybatch.core import (
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

Load = Callable[[], Tensor]


class SavedTensors:
    """Keeps what a graph saves out of the way. Use `hooks()` around the forwards, in each thread, and close after backward.

    Parameters, buffers and the batch itself (`stay`) are alive anyway and stay where they are. A tensor that several
    operations save is kept once, and a tensor that changed between is another one.
    """

    def __init__(self, offload: Offload, stay: Iterable[Tensor], device: torch.device, file: TensorFile) -> None:
        self._offload = offload
        self._file = file
        self._stay = {storage_cdata(tensor.untyped_storage()) for tensor in stay if type(tensor) in _PLAIN}
        self._budget = _half_of_free(device) if offload == "auto" else 0
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
        """Let this thread's graph save through the keeper."""
        if self._offload is None:
            return nullcontext()
        if is_dynamo_loaded():  # something may be compiled, and the hooks are not to be compiled into it
            return saved_tensors_hooks(torch.compiler.disable(self._pack), torch.compiler.disable(_unpack))
        return saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, tensor: Tensor) -> Load:
        version = version_of(tensor)
        if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.nbytes < SMALLEST:
            return _Stays(tensor.detach(), version)
        storage = tensor.untyped_storage()
        if storage_cdata(storage) in self._stay or storage.nbytes() > 2 * tensor.nbytes:
            return _Stays(tensor.detach(), version)
        kept = self._kept.get(storage_cdata(storage))
        if kept is None or kept.version != version:
            if self._budget >= storage.nbytes():
                self._budget -= storage.nbytes()
                return _Stays(tensor.detach(), version)
            self._kept = {key: one for key, one in self._kept.items() if not one.storage.expired()}
            # the weak reference holds the storage's address: no other storage can be taken for this one
            kept = _Kept(StorageWeakRef(storage), version, self._put(storage, tensor.device))
            self._kept[storage_cdata(storage)] = kept
        return partial(_rebuild, kept.load, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def _put(self, storage: torch.UntypedStorage, device: torch.device) -> Load:
        flat = _bytes_of(storage)
        if device.type != "cpu":
            host = torch.empty(flat.shape, dtype=torch.uint8, pin_memory=True)
            if self._offload != "disk":
                host.copy_(flat, non_blocking=True)
                return _Once(lambda: host.to(device, non_blocking=True))
            host.copy_(flat)
            flat = host
        place = self._file.write(flat)
        return _Once(lambda: self._file.read(*place).to(device))


_PLAIN = (Tensor, torch.nn.Parameter)


@dataclass(frozen=True, slots=True)
class _Kept:
    storage: StorageWeakRef
    version: int
    load: Load


@dataclass(slots=True)
class _Once:
    """Reads what was put away; a reader who comes while another still holds it gets the same."""

    read: Load
    _last: StorageWeakRef | None = None

    def __call__(self) -> Tensor:
        storage = None if self._last is None else storage_behind(self._last)
        if storage is not None:
            return _bytes_of(storage)
        flat = self.read()
        self._last = StorageWeakRef(flat.untyped_storage())
        return flat


def _rebuild(load: Load, dtype: torch.dtype, size: torch.Size, stride: tuple[int, ...], offset: int) -> Tensor:
    """Make a saved tensor a view of the storage that was put away."""
    flat = load()
    return torch.empty(0, dtype=dtype, device=flat.device).set_(flat.untyped_storage(), offset, size, stride)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


@dataclass(frozen=True, slots=True)
class _Stays:
    """A saved tensor that is where it was. Torch does not look after tensors that went through a hook, so this does.

    It is held without its graph: the two would hold each other, and a batch that failed would never be freed.
    """

    tensor: Tensor
    version: int

    def __call__(self) -> Tensor:
        if version_of(self.tensor) != self.version:
            raise RuntimeError(
                f"a tensor of shape {tuple(self.tensor.shape)} that backward needs was modified by an inplace operation: it is "
                f"at version {version_of(self.tensor)}, expected {self.version}. Use the operation that returns a new tensor."
            )
        return self.tensor


def _unpack(packed: Load) -> Tensor:
    return packed()


def _half_of_free(device: torch.device) -> int:
    # where the system does not tell, nothing is assumed to fit
    return (free_on_device(device) if device.type != "cpu" else free_on_host() or 0) // 2

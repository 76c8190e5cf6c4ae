"""A meter that follows every storage by a weak reference: what is alive is counted, not what was predicted."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorages(TorchDispatchMode):
    """The bytes that operations inside the block made and that live still, and the most of them at any moment."""

    def __init__(self, standing: Iterable[Tensor]) -> None:
        super().__init__()
        self._standing = {tensor.untyped_storage()._cdata for tensor in standing}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    @property
    def live(self) -> int:
        self._alive = {key: held for key, held in self._alive.items() if not held[0].expired()}
        return sum(num_bytes for _, num_bytes in self._alive.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                if storage._cdata not in self._standing:
                    self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.live)
        return result


def peak_of(act: Callable[[], object], standing: Iterable[Tensor]) -> int:
    """The most bytes alive at any moment of `act`, without those of the tensors that were there before."""
    with LiveStorages(standing) as storages:
        act()
    return storages.peak

"""Running out of memory on purpose, at a chosen operation."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class OutOfMemoryAt(TorchDispatchMode):
    """Raises what an allocator raises at each of these operations, counted from 0 over forward, backward and step alike."""

    def __init__(self, *points: int) -> None:
        super().__init__()
        self.points = points
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        point = len(self.seen)
        self.seen.append(str(func))
        if point in self.points:
            raise torch.OutOfMemoryError(f"CUDA out of memory at operation {point}, {func}")
        return func(*args, **(kwargs or {}))


class OutOfMemoryAbove(TorchDispatchMode):
    """Raises whenever one operation returns more than `limit` numbers: what does not fit, does not fit again."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor._base is None and tensor.numel() > self.limit:
                raise RuntimeError(
                    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried "
                    f"to allocate {4 * tensor.numel()} bytes. Error code 12 (Cannot allocate memory)"
                )
        return result

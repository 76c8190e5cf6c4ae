"""Record the tensor memory of an update op by op, by kind."""

import bisect
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from anybatch.core import TO_COPY, TorchDispatchMode, is_in_backward, storage_cdata

UNCOUNTED_DEVICE = "meta"
"""Device that stands for memory which is not counted: a batch on the host for a model on a GPU."""
_ASK_DEVICE = torch.ops.prim.device.default


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Memory at one moment in bytes: of parameters, `gradients`, `optimizer` state, activations, `inputs`, temporaries."""

    parameters: int = 0
    """Parameters and buffers."""
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    """Tensors that forward saved for backward."""
    inputs: int = 0
    temporaries: int = 0
    """Everything else that is alive at that moment."""

    @property
    def kinds(self) -> dict[str, int]:
        """Bytes by kind."""
        return {one.name: getattr(self, one.name) for one in fields(Breakdown)}

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(self.kinds.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment(Breakdown):
    """Bytes alive after one op, by kind."""

    is_step: bool = False  # True after the last backward pass: gradients are clipped, the optimizer steps


Moments = tuple[Moment, ...]


def highest(moments: Iterable[Moment]) -> Moment:
    return max(moments, key=lambda moment: moment.total, default=Moment())


@dataclass(frozen=True, slots=True)
class Timeline:
    """Bytes alive after each op of one update, in order."""

    ops: tuple[str, ...]
    live: tuple[int, ...]

    @property
    def peak(self) -> int:
        return max(self.live, default=0)


@dataclass(slots=True)
class _Held:
    """One storage: its size, and the ops at which it was allocated and freed."""

    size: int
    born: int
    kind: str | None = None  # None for an activation or a temporary: an activation is alive when backward starts
    gradient_from: int | None = None  # the op at which it became a gradient
    died: int | None = None


class Recorder(TorchDispatchMode):
    """A dispatch mode that follows every storage that an op returns, by a weak reference.

    Works on fake and real tensors, in every thread that enters the mode. Views of `uncounted` tensors are not followed;
    `batch_bytes` stand for them. Memory that a kernel allocates and frees itself is not seen.
    """

    def __init__(
        self, standing: Iterable[tuple[str, Tensor]], *, uncounted: Iterable[Tensor] = (), batch_bytes: int = 0
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[str] = []
        self.live: list[int] = []
        self._backward_ops: list[int] = []
        self._held: list[_Held] = []
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], _Held]] = {}
        self._lock = threading.RLock()
        self._now = self._batch_bytes = batch_bytes
        self._uncounted = {storage_cdata(tensor.untyped_storage()): tensor for tensor in uncounted}
        for kind, tensor in standing:
            self._follow(tensor, kind)

    @property
    def num_forward_ops(self) -> int:
        """Number of ops before the first of a backward pass: about the number of nodes in the graph."""
        return self._backward_ops[0] if self._backward_ops else 0

    def watch_gradients(self, parameters: Iterable[nn.Parameter]) -> list[Any]:
        """Count a `.grad` as gradients once backward has added to it; return the hooks, to be removed."""
        return [
            parameter.register_post_accumulate_grad_hook(self._is_gradient)
            for parameter in parameters
            if parameter.requires_grad
        ]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is _ASK_DEVICE:
            return output
        with self._lock:
            is_moved = func is TO_COPY and args[0].device.type == UNCOUNTED_DEVICE
            for tensor in output if isinstance(output, (tuple, list)) else (output,):
                if isinstance(tensor, Tensor):
                    self._follow(tensor, "inputs" if is_moved else None)
            if is_in_backward():
                self._backward_ops.append(len(self.ops))
            self.ops.append(func.name())
            self.live.append(self._now)
        return output

    def moments(self) -> Moments:
        """Return the memory by kind after each op that can be the peak if some kind takes less.

        An op is left out if another op of the same phase had at least as much of every kind.
        """
        changes: dict[int, list[tuple[str, int]]] = {}  # bytes allocated or freed, by the number of the op
        for held in self._held:
            kind = self._kind_of(held)
            changes.setdefault(held.born, []).append((kind, held.size))
            if held.gradient_from is not None and (held.died is None or held.gradient_from <= held.died):
                changes.setdefault(held.gradient_from, []).extend([(kind, -held.size), ("gradients", held.size)])
                kind = "gradients"
            if held.died is not None:
                changes.setdefault(held.died + 1, []).append((kind, -held.size))
        last = self._backward_ops[-1] if self._backward_ops else len(self.ops)
        now = Breakdown().kinds
        now["inputs"] = self._batch_bytes
        kept: dict[bool, list[tuple[int, ...]]] = {False: [], True: []}
        for op in sorted(op for op in changes if op < len(self.ops)):
            for kind, nbytes in changes[op]:
                now[kind] += nbytes
            _keep(kept[op > last], tuple(now.values()))
        return tuple(
            Moment(**dict(zip(now, values, strict=True)), is_step=is_step)
            for is_step, some in kept.items()
            for values in some
        )

    def _kind_of(self, held: _Held) -> str:
        """Return the kind of a storage before it becomes a gradient."""
        if held.kind is not None:
            return held.kind
        # a storage of a forward that is alive at the next op of backward was saved for it
        index = bisect.bisect_left(self._backward_ops, held.born)
        backward = self._backward_ops[index] if index < len(self._backward_ops) else None
        is_saved = backward not in (None, held.born) and (held.died is None or held.died >= backward)
        return "activations" if is_saved else "temporaries"

    def _follow(self, tensor: Tensor, kind: str | None = None) -> None:
        if tensor.device.type == UNCOUNTED_DEVICE:
            return
        storage = tensor.untyped_storage()
        if storage_cdata(storage) in self._uncounted:
            return
        key, size = id(storage), storage.nbytes()
        known = self._alive.get(key)
        if known is not None and known[0]() is storage:
            self._now += size - known[1].size  # not 0 if it was resized
            known[1].size = size
            return
        held = _Held(size, len(self.ops), kind)
        self._held.append(held)
        self._now += size
        self._alive[key] = weakref.ref(storage, lambda _, key=key: self._died(key)), held  # type: ignore[misc]

    def _died(self, key: int) -> None:
        with self._lock:
            held = self._alive.pop(key)[1]
            held.died = len(self.ops) - 1
            self._now -= held.size

    def _is_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is None:
            return
        with self._lock:
            known = self._alive.get(id(parameter.grad.untyped_storage()))
            if known is not None and known[1].gradient_from is None:
                known[1].gradient_from = len(self.ops)


def _keep(kept: list[tuple[int, ...]], values: tuple[int, ...]) -> None:
    if any(all(own <= other for own, other in zip(values, known, strict=True)) for known in reversed(kept)):
        return
    kept[:] = [known for known in kept if any(own < other for own, other in zip(values, known, strict=True))]
    kept.append(values)

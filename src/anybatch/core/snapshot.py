"""Snapshot and restore: tensors, buffers, an optimizer's state and random states.

`MovingBuffers` snapshots a model before passes that may run again, and copies only buffers that change. `TensorFile` holds
copies and offloaded activations on disk.
"""

import ctypes
import random
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from threading import Lock
from typing import Any, BinaryIO
from weakref import finalize

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from anybatch.core.batch import Batch, leaves
from anybatch.core.out_of_memory import free_memory
from anybatch.core.splits import Dealt, MicroBatches
from anybatch.core.torch_private import FakeTensor, NormLayer, buffers_of, disable_current_modes, version_of
from anybatch.errors import BatchError, user_stacklevel

Copy = Callable[[], Tensor]
"""Returns the values that a tensor had when the copy was made."""
Slot = tuple[nn.Module, str]
"""A module and the name of one of its buffers."""
Held = tuple[Tensor | None, Copy | None]
"""The tensor that was in a slot, and its copy; None for a buffer that does not change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Random state, buffers, other tensors and an optimizer's state at one moment."""

    random: "RandomState | None" = None
    buffers: Mapping[Slot, Held] = field(default_factory=dict)
    tensors: Sequence[tuple[Tensor, Copy]] = ()
    optimizer: Callable[[], None] | None = None
    """Restores the dicts of the optimizer; the tensors in them are among `tensors`."""

    @classmethod
    def of(
        cls,
        tensors: Iterable[Tensor],
        *,
        optimizer: Optimizer | None = None,
        random: "RandomState | None" = None,
        spill: bool = False,
    ) -> "Snapshot":
        """Copy tensors and the optimizer's state; with `spill`, to the host or to disk."""
        state = () if optimizer is None else (held for held in optimizer.state.values() if isinstance(held, dict))
        values = [value.data for held in state for value in held.values() if isinstance(value, Tensor)]
        file = TensorFile()
        return cls(
            random=random,
            tensors=[(one, spilled_copy(one, file) if spill else cloned(one)) for one in (*tensors, *values)],
            optimizer=None if optimizer is None else _optimizer_tables(optimizer),
        )

    def put_back(self) -> None:
        """Restore everything."""
        if self.optimizer is not None:
            self.optimizer()
            free_memory()  # releases the state of a failed step before copies are read back
        with torch.no_grad():
            for tensor, copy in self.tensors:
                tensor.copy_(copy())
        for (module, name), (buffer, was) in self.buffers.items():
            buffers_of(module)[name] = buffer
            if buffer is not None and was is not None:
                buffer.data.copy_(was())  # .data: a graph that saved this buffer must not see a new version
        if self.random is not None:
            self.random.restore()


def _optimizer_tables(optimizer: Optimizer) -> Callable[[], None]:
    """Copy the dicts of the optimizer, not their tensors; return a function that restores them."""
    state = {key: dict(held) if isinstance(held, dict) else held for key, held in optimizer.state.items()}
    groups = [dict(group) for group in optimizer.param_groups]

    def put_back() -> None:
        for key in [key for key in optimizer.state if key not in state]:
            del optimizer.state[key]
        for key, held in state.items():
            optimizer.state[key] = dict(held) if isinstance(held, dict) else held
        for group, was in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(was)

    return put_back


def of_step(optimizer: Optimizer, parameters: Sequence[nn.Parameter], *, draws: bool) -> Snapshot:
    """Snapshot everything that a step changes: parameters, gradients (nesterov adds to them), state, options, random state.

    The random state is copied only if the step `draws`.
    """
    gradients = [p.grad.detach() for p in parameters if p.grad is not None and not p.grad.is_sparse]
    changing = [*(parameter.detach() for parameter in parameters), *gradients]
    drawn = random_state(parameter.device for parameter in parameters) if draws else None
    return Snapshot.of(changing, optimizer=optimizer, random=drawn, spill=True)


def of_statistics(layers: Iterable[nn.Module]) -> Snapshot:
    return Snapshot.of(buffer for layer in layers for buffer in layer.buffers(False))


def tracking_layers(model: nn.Module) -> list[nn.Module]:
    """List the BatchNorm and InstanceNorm layers that keep running statistics."""
    return [module for module in model.modules() if isinstance(module, NormLayer) and module.track_running_stats]


class MovingBuffers:
    """Snapshots of the buffers of some modules, before passes that may run again.

    The first snapshot copies all buffers, later ones only those that have changed since (running statistics, power
    iterations, moving averages), in place or by assignment. Constant tables are copied once. State that is neither a buffer
    nor torch's random state is not covered.

    With `spill`, for snapshots that are seldom restored, the first copies go to the host or to disk, and are released once
    the second snapshot has been compared with them. Without it they live as long as this object, so that any earlier
    snapshot can be restored.
    """

    def __init__(self, modules: Sequence[nn.Module], *, spill: bool = False) -> None:
        self._modules = modules
        self._spill = spill
        self._known: dict[Slot, tuple[Tensor | None, int]] = {}
        self._moving: set[Slot] = set()
        self._first: dict[Slot, Copy] = {}

    def snapshot(self) -> Snapshot:
        known: dict[Slot, tuple[Tensor | None, int]] = {}
        buffers: dict[Slot, Held] = {}
        file: TensorFile | None = None  # for new buffers
        for slot, tensor in self._slots():
            file = file or (None if slot in self._known else TensorFile())
            version = -1 if tensor is None else version_of(tensor)
            buffers[slot] = (tensor, None if tensor is None else self._copy(slot, tensor, version, file))
            known[slot] = (tensor, version)
        self._known = known
        devices = (tensor.device for top in self._modules for tensor in (*top.parameters(), *top.buffers()))
        return Snapshot(random=random_state(devices), buffers=buffers)

    def put_back(self, snapshot: Snapshot) -> list[str]:
        """Restore random state and buffers; return the names of changed buffers of which there is no copy."""
        whole = {slot: self._with_first(slot, held) for slot, held in snapshot.buffers.items()}
        Snapshot(random=snapshot.random, buffers=whole).put_back()
        return [
            f"{type(slot[0]).__name__}.{slot[1]}"
            for slot, (tensor, copy) in whole.items()
            if tensor is not None and copy is None and self._has_moved(slot, tensor)
        ]

    def moved(self) -> list[Slot]:
        """List the buffers that changed, other than those of BatchNorm and InstanceNorm."""
        return [
            slot
            for slot, tensor in self._slots()
            if not isinstance(slot[0], NormLayer)
            and tensor is not None
            and slot in self._known
            and (self._has_moved(slot, tensor) or _differs(self._first.get(slot), tensor))
        ]

    def _copy(self, slot: Slot, tensor: Tensor, version: int, file: "TensorFile | None") -> Copy | None:
        """Copy a buffer that is new, or has changed, or belongs to BatchNorm, whose kernels do not raise its version."""
        if isinstance(slot[0], NormLayer):
            return cloned(tensor)
        before = self._known.get(slot)
        if before is None:
            self._first[slot] = spilled_copy(tensor.detach(), file) if self._spill and file else cloned(tensor)
            return self._first[slot]
        # a write through .data does not raise the version: compare with the first copy
        is_other = before[0] is not tensor or before[1] != version
        if is_other or (self._spill and _differs(self._first.pop(slot, None), tensor)):
            self._moving.add(slot)
        return cloned(tensor) if slot in self._moving else None

    def _with_first(self, slot: Slot, held: Held) -> Held:
        """Use the first copy of a buffer that changed only after this snapshot."""
        tensor, copy = held
        if tensor is None or copy is not None or not self._has_moved(slot, tensor):
            return held
        return tensor, self._first.get(slot)

    def _has_moved(self, slot: Slot, tensor: Tensor) -> bool:
        known, version = self._known[slot]
        return slot in self._moving or known is not tensor or version != version_of(tensor)

    def _slots(self) -> Iterator[tuple[Slot, Tensor | None]]:
        for top in self._modules:
            for module in top.modules():
                for name, tensor in buffers_of(module).items():
                    yield (module, name), tensor


def _differs(first: Copy | None, tensor: Tensor) -> bool:
    if first is None or isinstance(tensor, FakeTensor) or tensor.is_meta:
        return False
    return not torch.equal(first().to(tensor.device), tensor)


class BatchState(MovingBuffers):
    """Buffers of one model and its loss, from batch to batch.

    `on_new_buffers()` is called when the set of buffers changes, such as after a BatchNorm layer was added.
    """

    def __init__(self, modules: Sequence[nn.Module], on_new_buffers: Callable[[], None]) -> None:
        super().__init__(modules, spill=True)
        self._on_new_buffers = on_new_buffers
        self._warned: set[Slot] = set()
        self._num_checked = -1

    def snapshot(self) -> Snapshot:
        slots = self._known.keys()
        before = super().snapshot()
        if self._known.keys() != slots:
            self._on_new_buffers()
        return before

    def forget(self, buffers: Mapping[Slot, Held]) -> None:
        """Restore buffers after a batch without a step. The random state is not restored."""
        lost = self.put_back(Snapshot(buffers=buffers))
        if lost:
            warnings.warn(
                f"this batch was not learnt from, but it was the first to change {', '.join(lost)}, of which there is no copy: "
                "what it left there stays. From now on copies are made.",
                stacklevel=user_stacklevel(),
            )

    def warn_of_moving(
        self, knows: Callable[[nn.Module, str], bool], num_passes: int, effect: Callable[[], str]
    ) -> None:
        """Warn once of buffers that each of `num_passes` micro-batches changed, where the whole batch would change them once.

        `knows(module, name)` is True for buffers that advance once per batch; `effect()` describes the effect on the loss.
        Checked after the first batch that is cut, and when more buffers move than before.
        """
        if self._num_checked == len(self._moving):
            return
        moved = [slot for slot in self.moved() if slot not in self._warned and not knows(*slot)]
        self._num_checked = len(self._moving)
        self._warned.update(moved)
        if moved:
            paths = {module: name for top in self._modules for name, module in top.named_modules()}
            names = [f"{paths.get(module, '')}.{buffer}".lstrip(".") for module, buffer in moved]
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            warnings.warn(
                f"the forward changes buffers of its own ({', '.join(names[:4])}{more}): {num_passes} times in this batch, "
                f"once per micro-batch, where the whole batch would change them once.{effect()} verify(model, objective, "
                "batch) measures what that does to the gradient. Change them outside of forward, once per update.",
                stacklevel=user_stacklevel(),
            )


@dataclass(frozen=True, slots=True)
class WriteWatch:
    """Versions of the tensors of some rows. Writes through `.data` or NumPy do not change a version."""

    rows: Batch
    writes: tuple[int, ...]

    @classmethod
    def of(cls, rows: Batch) -> "WriteWatch":
        return cls(rows, tuple(version_of(tensor) for _, tensor in _tensors(rows)))

    def check(self, why: str) -> None:
        """Raise `BatchError` if a tensor was written to since; `why` says what needs the original rows."""
        for (path, tensor), before in zip(_tensors(self.rows), self.writes, strict=True):
            if version_of(tensor) != before:
                raise BatchError(
                    f"the forward writes into its input: batch{path} of shape {tuple(tensor.shape)} was changed in place, and "
                    f"{why} on rows that are no longer the batch's. Do not change the batch: x = x * 2 instead of x *= 2, "
                    "F.relu(x) instead of F.relu_(x) or nn.ReLU(inplace=True); or begin with x = x.clone()."
                )


def _tensors(rows: Batch) -> list[tuple[str, Tensor]]:
    rows = rows.batch if isinstance(rows, Dealt) else rows
    rows = rows.micro_batches if isinstance(rows, MicroBatches) else rows
    return [(path, leaf) for path, leaf in leaves(rows) if isinstance(leaf, Tensor)]


@dataclass(frozen=True, slots=True)
class RandomState:
    """States of torch's generators."""

    cpu: Tensor
    accelerators: tuple[tuple[torch.device, Tensor], ...]

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        for device, state in self.accelerators:
            torch.get_device_module(device).set_rng_state(state, device)

    def is_now(self) -> bool:
        """True if nothing was drawn since."""
        with disable_current_modes():  # the states are real tensors, even under a fake tensor mode
            now = random_state(device for device, _ in self.accelerators)
            pairs = zip(self.accelerators, now.accelerators, strict=True)
            return torch.equal(self.cpu, now.cpu) and all(torch.equal(mine, other) for (_, mine), (_, other) in pairs)


def random_state(devices: Iterable[torch.device]) -> RandomState:
    if not has_accelerator():
        return RandomState(torch.get_rng_state(), ())
    accelerators = sorted({device for device in devices if device.type not in ("cpu", "meta")}, key=str)
    states = tuple((device, torch.get_device_module(device).get_rng_state(device)) for device in accelerators)
    return RandomState(torch.get_rng_state(), states)


@cache
def has_accelerator() -> bool:
    return torch.accelerator.is_available()


@dataclass(frozen=True, slots=True)
class OuterRandom:
    """States of the generators `random` and `numpy.random`."""

    python: tuple[Any, ...]
    numpy: tuple[Any, ...] | None
    """Plain values; None if NumPy was not loaded."""

    def restore(self) -> None:
        random.setstate(self.python)
        if self.numpy is not None:
            import numpy

            name, keys, *rest = self.numpy
            numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))

    def moved(self) -> list[str]:
        """Return the names of the generators that have been drawn from since."""
        now = outer_random()
        pairs = {"random": (self.python, now.python), "numpy.random": (self.numpy, now.numpy)}
        return [name for name, (before, after) in pairs.items() if before is not None and before != after]

    def as_values(self) -> dict[str, Any]:
        """Convert to values that `torch.load(weights_only=True)` takes."""
        return {"python": self.python} | ({} if self.numpy is None else {"numpy": self.numpy})

    @classmethod
    def of_values(cls, values: Mapping[str, Any]) -> "OuterRandom":
        """Read what `as_values` returned; other entries are ignored."""
        return cls(values["python"], values.get("numpy"))


def outer_random() -> OuterRandom:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return OuterRandom(random.getstate(), None)
    name, keys, *rest = numpy.random.get_state()
    return OuterRandom(random.getstate(), (name, keys.tolist(), *rest))


def cloned(tensor: Tensor) -> Copy:
    copy = tensor.detach().clone()
    return lambda: copy


def spilled_copy(tensor: Tensor, file: "TensorFile") -> Copy:
    """Copy a tensor from the device to the host, or from the host to `file`; fake and meta tensors are not copied."""
    if isinstance(tensor, FakeTensor) or tensor.device.type == "meta":
        return lambda: tensor
    if type(tensor) is not Tensor or tensor.layout is not torch.strided:
        return cloned(tensor)
    if tensor.device.type != "cpu":
        host = tensor.to("cpu")
        return lambda: host
    dtype, shape = tensor.dtype, tensor.shape
    place = file.write(tensor.contiguous().flatten().view(torch.uint8))
    return lambda: file.read(*place).view(dtype).view(shape)


class TensorFile:
    """An unnamed file in the directory for temporary files (TMPDIR), overwritten from batch to batch.

    Overwriting costs a thirtieth of writing to new pages. The file is as large as the largest batch was. The system deletes
    it with this object, or when the process ends.
    """

    def __init__(self) -> None:
        self._file: BinaryIO | None = None
        self._lock = Lock()  # backward has a thread per device
        self.num_bytes = 0
        """Written since the last rewind."""

    def __reduce__(self) -> tuple[type["TensorFile"], tuple[()]]:
        return TensorFile, ()  # a copy has a file of its own

    def write(self, flat: Tensor) -> tuple[int, int]:
        """Append the bytes; return their offset and number."""
        if self._file is None:
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
            finalize(self, self._file.close)  # not __del__: in a cycle, the file would be collected first
        place = self.num_bytes, flat.nbytes
        self._transfer(self._file.write, flat, self.num_bytes)
        self.num_bytes += flat.nbytes
        return place

    def read(self, offset: int, num_bytes: int) -> Tensor:
        """Read the bytes written at `offset` into a new tensor."""
        assert self._file is not None
        flat = torch.empty(num_bytes, dtype=torch.uint8)
        self._transfer(self._file.readinto, flat, offset)  # type: ignore[attr-defined]
        return flat

    def rewind(self) -> None:
        """Start over at the beginning of the file."""
        self.num_bytes = 0

    def close(self) -> None:
        self.num_bytes = 0
        if self._file is not None:
            self._file.close()
            self._file = None

    def _transfer(self, move: Callable[[memoryview], int], flat: Tensor, offset: int) -> None:
        """Copy every byte of `flat` to or from the file: the system may copy fewer at a time."""
        assert self._file is not None
        view = memoryview((ctypes.c_char * flat.nbytes).from_address(flat.data_ptr())).cast("B")
        with self._lock:
            self._file.seek(offset)
            while view:
                moved = move(view)
                if not moved:
                    raise OSError(
                        f"the file of offloaded tensors ends {len(view)} bytes early, in {tempfile.gettempdir()}."
                    )
                view = view[moved:]

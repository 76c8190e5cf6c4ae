"""`Snapshot`: what a forward or a step may change, as it was at one moment, to be put back."""

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

from anybatch.core.batch import Batch, children
from anybatch.core.out_of_memory import free_memory
from anybatch.core.splits import Dealt, MicroBatches
from anybatch.core.torch_private import FakeTensor, NormLayer, buffers_of, num_writes, without_modes
from anybatch.errors import BatchError, levels_to_the_caller


class TensorFile:
    """A file without a name in the directory for temporary files (TMPDIR), written over from batch to batch.

    To write where something was written before costs a thirtieth of writing to new pages. It takes as much disk as the largest
    batch did, and is gone with this object, or after an error, or when the process ends, however it ends.
    """

    def __init__(self) -> None:
        self._file: BinaryIO | None = None
        self._lock = Lock()  # backward has a thread per device
        self.num_bytes = 0
        """Written since the last rewind."""

    def __reduce__(self) -> tuple[type["TensorFile"], tuple[()]]:
        return TensorFile, ()  # a copy has a file of its own

    def write(self, flat: Tensor) -> tuple[int, int]:
        """Append the bytes; where they are, and how many."""
        if self._file is None:
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
            finalize(self, self._file.close)  # and not by __del__: in a cycle, the file would be collected before it
        place = self.num_bytes, flat.nbytes
        self._transfer(self._file.write, flat, self.num_bytes)
        self.num_bytes += flat.nbytes
        return place

    def read(self, offset: int, num_bytes: int) -> Tensor:
        """The bytes written at `offset`, in a new tensor."""
        assert self._file is not None
        flat = torch.empty(num_bytes, dtype=torch.uint8)
        self._transfer(self._file.readinto, flat, offset)  # type: ignore[attr-defined]
        return flat

    def rewind(self) -> None:
        """Forget what was written; the next batch goes over it."""
        self.num_bytes = 0

    def close(self) -> None:
        """Give the disk back."""
        self.num_bytes = 0
        if self._file is not None:
            self._file.close()
            self._file = None

    def _transfer(self, move: Callable[[memoryview], int], flat: Tensor, offset: int) -> None:
        """Every byte of `flat`, to or from the file: the system may move fewer at a time."""
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


def kept_aside(tensor: Tensor, file: TensorFile) -> Callable[[], Tensor]:
    """What gives back a copy of `tensor` as it is now; tensors that hold no numbers are not copied."""
    if isinstance(tensor, FakeTensor) or tensor.device.type == "meta":
        return lambda: tensor
    if type(tensor) is not Tensor or tensor.layout is not torch.strided:
        copy = tensor.clone()
        return lambda: copy
    if tensor.device.type != "cpu":
        host = tensor.to("cpu")
        return lambda: host
    dtype, shape = tensor.dtype, tensor.shape
    place = file.write(tensor.contiguous().flatten().view(torch.uint8))
    return lambda: file.read(*place).view(dtype).view(shape)


MOST_PIECES, SMALLEST_PIECE = 64, 2**11


def pieces_of(numel: int) -> Iterator[slice]:
    """Slices of so many numbers: 64 at most, of 2,048 numbers at least."""
    step = max(SMALLEST_PIECE, -(-numel // MOST_PIECES))
    return (slice(start, min(start + step, numel)) for start in range(0, numel, step))


@dataclass(frozen=True, slots=True)
class RandomState:
    """Torch's generators at one moment."""

    cpu: Tensor
    accelerators: tuple[tuple[torch.device, Tensor], ...]

    def restore(self) -> None:
        """Draw from here again."""
        torch.set_rng_state(self.cpu)
        for device, state in self.accelerators:
            torch.get_device_module(device).set_rng_state(state, device)

    def is_now(self) -> bool:
        """True if nothing was drawn since."""
        with without_modes():  # the states are real, also where a mode fakes the model's tensors
            now = random_state(device for device, _ in self.accelerators)
            pairs = zip(self.accelerators, now.accelerators, strict=True)
            return torch.equal(self.cpu, now.cpu) and all(torch.equal(mine, other) for (_, mine), (_, other) in pairs)


def random_state(devices: Iterable[torch.device]) -> RandomState:
    """The state of the CPU's generator and of those of `devices`."""
    if not has_accelerator():
        return RandomState(torch.get_rng_state(), ())
    accelerators = sorted({device for device in devices if device.type not in ("cpu", "meta")}, key=str)
    states = tuple((device, torch.get_device_module(device).get_rng_state(device)) for device in accelerators)
    return RandomState(torch.get_rng_state(), states)


@cache
def has_accelerator() -> bool:
    """True where this machine has a device beside the CPU."""
    return torch.accelerator.is_available()


Copy = Callable[[], Tensor]
"""What gives back a tensor as it was when the copy was made."""
Slot = tuple[nn.Module, str]
"""A module and the name of one of its buffers."""
Held = tuple[Tensor | None, Copy | None]
"""The tensor that was in a slot, and its copy; None where no copy was made, because nobody was seen to change it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Random draws, buffers, other tensors, an optimizer's state. One of nothing costs nothing and changes nothing."""

    random: RandomState | None = None
    buffers: Mapping[Slot, Held] = field(default_factory=dict)
    tensors: Sequence[tuple[Tensor, Copy]] = ()
    """Each with its copy: parameters, gradients, an optimizer's state, running statistics."""
    optimizer: "OptimizerTables | None" = None

    def put_back(self) -> None:
        """Make everything what it was."""
        if self.optimizer is not None:
            self.optimizer.put_back()
        with torch.no_grad():
            for tensor, copy in self.tensors:
                tensor.copy_(copy())
        for (module, name), (buffer, was) in self.buffers.items():
            buffers_of(module)[name] = buffer
            if buffer is not None and was is not None:
                # .data: what a graph has saved of this buffer is not to be called modified, it is what it was
                buffer.data.copy_(was())
        if self.random is not None:
            self.random.restore()


NOTHING = Snapshot()


@dataclass(frozen=True, slots=True)
class OptimizerTables:
    """Which state and options an optimizer held for which parameter. Its tensors are copied by `Snapshot.tensors`."""

    optimizer: Optimizer
    state: dict[Any, Any]
    groups: list[dict[str, Any]]

    def put_back(self) -> None:
        """Forget state that was made since, and put options back."""
        held = self.optimizer.state
        for key in [key for key in held if key not in self.state]:
            del held[key]
        for key, entries in self.state.items():
            held[key] = dict(entries) if isinstance(entries, dict) else entries
        for group, was in zip(self.optimizer.param_groups, self.groups, strict=True):
            group.clear()
            group.update(was)
        free_memory()  # half-made state makes room for what is read back


def in_place(tensor: Tensor) -> Copy:
    """A copy beside the tensor, on its own device."""
    copy = tensor.detach().clone()
    return lambda: copy


def of_statistics(layers: Iterable[nn.Module]) -> Snapshot:
    """The running statistics of these layers."""
    return Snapshot(tensors=tuple((buffer, in_place(buffer)) for layer in layers for buffer in layer.buffers(False)))


def tracking_layers(model: nn.Module) -> list[nn.Module]:
    """BatchNorm and InstanceNorm layers that keep running statistics."""
    return [module for module in model.modules() if isinstance(module, NormLayer) and module.track_running_stats]


def tables_of(optimizer: Optimizer) -> OptimizerTables:
    """Which state and options the optimizer holds now; no tensor is copied."""
    state = {key: dict(held) if isinstance(held, dict) else held for key, held in optimizer.state.items()}
    return OptimizerTables(optimizer, state, [dict(group) for group in optimizer.param_groups])


def of_step(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> Snapshot:
    """What a step changes: parameters, gradients, state, options, random draws. Copies lie where memory is not short."""
    tables = tables_of(optimizer)
    values = [value for held in tables.state.values() if isinstance(held, dict) for value in held.values()]
    gradients = [
        p.grad.detach() for p in parameters if p.grad is not None and not p.grad.is_sparse
    ]  # nesterov adds to them
    changing = [
        *(parameter.detach() for parameter in parameters),
        *gradients,
        *(value for value in values if isinstance(value, Tensor)),
    ]
    file = TensorFile()
    return Snapshot(
        random=random_state({parameter.device for parameter in parameters}),
        tensors=[(tensor, kept_aside(tensor, file)) for tensor in changing],
        optimizer=tables,
    )


class MovingBuffers:
    """Takes snapshots of some modules before what may have to run again, and puts them back.

    All buffers are copied for the first snapshot, and from then on only those that were seen to change (running statistics,
    power iterations, moving averages), be it in place or by assignment: no masks, no tables of positions. State that is
    neither a buffer nor torch's random state is out of sight.

    `aside` is for snapshots that are seldom put back, one per batch: the first copies go to where memory is not short, and are
    given up when the second snapshot has been compared with them. Without it they stay, beside the buffers, for as long as this
    object does, so that any earlier snapshot can be put back whole.
    """

    def __init__(self, modules: Sequence[nn.Module], *, aside: bool = False) -> None:
        self._modules = modules
        self._is_aside = aside
        self._known: dict[Slot, tuple[Tensor | None, int]] = {}
        self._moving: set[Slot] = set()
        self._first: dict[Slot, Copy] = {}
        self.num_layouts = 0
        """How often the modules were seen to have other buffers than before; BatchNorm has some, if only empty places."""

    @property
    def num_moving(self) -> int:
        """How many buffers were seen to change, by the last snapshot."""
        return len(self._moving)

    def snapshot(self) -> Snapshot:
        """This moment, to go back to."""
        known: dict[Slot, tuple[Tensor | None, int]] = {}
        buffers: dict[Slot, Held] = {}
        keep = self._keep()
        for slot, tensor in self._slots():
            version = -1 if tensor is None else num_writes(tensor)
            buffers[slot] = (tensor, None if tensor is None else self._copy(slot, tensor, version, keep))
            known[slot] = (tensor, version)
        if known.keys() != self._known.keys():
            self.num_layouts += 1
        self._known = known
        return Snapshot(random=random_state(self._devices()), buffers=buffers)

    def put_back(self, snapshot: Snapshot) -> list[str]:
        """Make generators and buffers what they were; the names of buffers that changed for the first time, and stay so."""
        whole = {slot: self._with_first(slot, held) for slot, held in snapshot.buffers.items()}
        Snapshot(random=snapshot.random, buffers=whole).put_back()
        return [
            f"{type(module).__name__}.{name}"
            for (module, name), (tensor, copy) in whole.items()
            if tensor is not None and copy is None and self._has_moved((module, name), tensor)
        ]

    def moved(self) -> list[Slot]:
        """The buffers that somebody has changed since the last snapshot, or before it, without BatchNorm's and the like."""
        return [
            slot
            for slot, tensor in self._slots()
            if not isinstance(slot[0], NormLayer) and tensor is not None and self._is_other(slot, tensor)
        ]

    def _is_other(self, slot: Slot, tensor: Tensor) -> bool:
        return slot in self._known and (self._has_moved(slot, tensor) or self._differs(self._first.get(slot), tensor))

    def _copy(self, slot: Slot, tensor: Tensor, version: int, keep: Callable[[Tensor], Copy]) -> Copy | None:
        """A copy of a buffer never seen before, or seen to change, or BatchNorm's, which changes unseen."""
        if isinstance(slot[0], NormLayer):
            return in_place(tensor)
        before = self._known.get(slot)
        if before is None:
            self._first[slot] = keep(tensor.detach())
            return self._first[slot]
        if before[0] is not tensor or before[1] != version or self._differs_from_first(slot, tensor):
            self._moving.add(slot)
        return in_place(tensor) if slot in self._moving else None

    def _with_first(self, slot: Slot, held: Held) -> Held:
        """A buffer that did not move until this snapshot, and did later, is as the first copy has it."""
        tensor, copy = held
        if tensor is None or copy is not None or not self._has_moved(slot, tensor):
            return held
        return tensor, self._first.get(slot)

    def _has_moved(self, slot: Slot, tensor: Tensor) -> bool:
        known, version = self._known[slot]
        return slot in self._moving or known is not tensor or version != num_writes(tensor)

    def _differs_from_first(self, slot: Slot, tensor: Tensor) -> bool:
        """True of a buffer that the first batch changed through `.data`, which no version tells of."""
        return self._differs(self._first.pop(slot, None), tensor) if self._is_aside else False

    def _differs(self, first: Copy | None, tensor: Tensor) -> bool:
        if first is None or isinstance(tensor, FakeTensor) or tensor.is_meta:
            return False
        return not torch.equal(first().to(tensor.device), tensor)

    def _keep(self) -> Callable[[Tensor], Copy]:
        if not self._is_aside:
            return in_place
        file = TensorFile()
        return lambda tensor: kept_aside(tensor, file)

    def _slots(self) -> Iterator[tuple[Slot, Tensor | None]]:
        for top in self._modules:
            for module in top.modules():
                for name, tensor in buffers_of(module).items():
                    yield (module, name), tensor

    def _devices(self) -> set[torch.device]:
        if not has_accelerator():
            return set()
        return {tensor.device for top in self._modules for tensor in (*top.parameters(), *top.buffers())}


class BatchState:
    """The buffers of one model and its loss, from batch to batch.

    `look_again()` is called where modules have other buffers than before: a BatchNorm was put in, say.
    """

    def __init__(self, modules: Sequence[nn.Module], look_again: Callable[[], None]) -> None:
        self._modules = modules
        self._look_again = look_again
        self._buffers = MovingBuffers(modules, aside=True)
        self._told: set[Slot] = set()
        self._num_told = -1

    def snapshot(self) -> Snapshot:
        """This moment, to go back to."""
        num_layouts = self._buffers.num_layouts
        before = self._buffers.snapshot()
        if self._buffers.num_layouts != num_layouts:
            self._look_again()
        return before

    def put_back(self, before: Snapshot) -> list[str]:
        """Make buffers and random draws what they were; the names of buffers of which there was no copy."""
        return self._buffers.put_back(before)

    def forget(self, buffers: Mapping[Slot, Held]) -> None:
        """Make buffers what they were before a batch that teaches nothing; random draws stay drawn."""
        lost = self.put_back(Snapshot(buffers=buffers))
        if lost:
            warnings.warn(
                f"this batch was not learnt from, but it was the first to change {', '.join(lost)}, of which there is no copy: "
                "what it left there stays. From now on copies are made.",
                stacklevel=levels_to_the_caller(),
            )

    def tell_moving(self, knows: Callable[[nn.Module, str], bool], num_passes: int, effect: Callable[[], str]) -> None:
        """Warn once of buffers that `num_passes` micro-batches moved one after the other, where nobody makes it right.

        `knows(module, name)` is True of buffers that advance once per batch; `effect()` says what the others do to the loss.
        Looked for after the first batch that is cut, and where more buffers move than before.
        """
        if self._num_told == self._buffers.num_moving:
            return
        moved = [slot for slot in self._buffers.moved() if slot not in self._told and not knows(*slot)]
        self._num_told = self._buffers.num_moving
        self._told.update(moved)
        if moved:
            warnings.warn(
                f"the forward changes buffers of its own ({self._names(moved)}): {num_passes} times in this batch, once per "
                f"micro-batch, where the whole batch would change them once.{effect()} verify(model, objective, batch) "
                "measures what that does to the gradient. Change them outside of forward, once per update.",
                stacklevel=levels_to_the_caller(),
            )

    def _names(self, slots: Sequence[Slot]) -> str:
        paths = {module: name for top in self._modules for name, module in top.named_modules()}
        names = [f"{paths.get(module, '')}.{buffer}".lstrip(".") for module, buffer in slots]
        return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


@dataclass(frozen=True, slots=True)
class OuterRandom:
    """Where the generators `random` and `numpy.random` were at one moment."""

    python: tuple[Any, ...]
    numpy: tuple[Any, ...] | None
    """In plain values; None where NumPy was not loaded."""

    def restore(self) -> None:
        """Make the generators go on from here; NumPy's is left alone where it was not loaded at that moment."""
        random.setstate(self.python)
        if self.numpy is not None:
            import numpy

            name, keys, *rest = self.numpy
            numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))

    def moved(self) -> list[str]:
        """The generators that have been drawn from since, by the names under which they are imported."""
        now = outer_random()
        pairs = {"random": (self.python, now.python), "numpy.random": (self.numpy, now.numpy)}
        return [name for name, (before, after) in pairs.items() if before is not None and before != after]

    def as_values(self) -> dict[str, Any]:
        """The same as values that `torch.load(weights_only=True)` takes."""
        return {"python": self.python} | ({} if self.numpy is None else {"numpy": self.numpy})

    @classmethod
    def of_values(cls, values: Mapping[str, Any]) -> "OuterRandom":
        """What `as_values` gave; other entries are left alone."""
        return cls(values["python"], values.get("numpy"))


def outer_random() -> OuterRandom:
    """Where the generators are now."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return OuterRandom(random.getstate(), None)
    name, keys, *rest = numpy.random.get_state()
    return OuterRandom(random.getstate(), (name, keys.tolist(), *rest))


@dataclass(frozen=True, slots=True)
class WriteWatch:
    """How often each tensor of some rows had been written to, at one moment. Writes through `.data` or NumPy go unseen."""

    rows: Batch
    writes: tuple[int, ...]

    @classmethod
    def of(cls, rows: Batch) -> "WriteWatch":
        """The rows now."""
        return cls(rows, tuple(num_writes(tensor) for _, tensor in _tensors(rows)))

    def check(self, why: str) -> None:
        """Refuse rows that were written to since; `why` says what needs them as they were."""
        for (path, tensor), before in zip(_tensors(self.rows), self.writes, strict=True):
            if num_writes(tensor) != before:
                raise BatchError(
                    f"the forward writes into its input: batch{path} of shape {tuple(tensor.shape)} was changed in place, and "
                    f"{why} on rows that are no longer the batch's. Do not change the batch: x = x * 2 instead of x *= 2, "
                    "F.relu(x) instead of F.relu_(x) or nn.ReLU(inplace=True); or begin with x = x.clone()."
                )


def _tensors(rows: Batch, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor, and how it is reached."""
    if isinstance(rows, Tensor):
        yield path, rows
        return
    if isinstance(rows, Dealt):
        rows = rows.batch
    if isinstance(rows, MicroBatches):
        rows = rows.micro_batches
    for step, child in children(rows) or ():
        yield from _tensors(child, path + step)

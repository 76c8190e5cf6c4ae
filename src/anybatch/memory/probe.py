"""Trial updates that record their allocations: on fake tensors, which take no memory, or on real rows."""

import copy
import gc
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from anybatch.batch_norm import batch_norms, uses_batch_statistics
from anybatch.core import (
    Accumulator,
    Batch,
    Coupled,
    FakeTensor,
    FakeTensorMode,
    MicroBatches,
    Objective,
    Snapshot,
    Update,
    UpdateOptions,
    buffers_of,
    gradient_hooks_of,
    is_low,
    map_tensors,
    move,
    rows,
    tensors,
)
from anybatch.errors import PlanError
from anybatch.memory.meter import bytes_of, drop_gradients, metered, optimizer_tensors
from anybatch.memory.recorder import UNCOUNTED_DEVICE, Recorder, Timeline
from anybatch.verification import PythonState, functions_of

Parts = tuple[nn.Module, Optimizer | None, Any]
"""Model, optimizer and objective; copied together, so that what they share stays shared."""
HIDDEN = {
    "aten::convolution": "a convolution",
    "aten::mkldnn_rnn_layer": "an LSTM",
    "aten::lstm": "an LSTM",
    "aten::gru": "a GRU",
}
"""Ops with CPU kernels that allocate memory that no tensor shows."""
FIRST_RUNS = 2  # updates before the first recorded one: they fill the optimizer's state
# bytes outside torch's allocator:
NODE_BYTES = 1000  # of a graph node and its tensor objects; 840 to 910 were measured
MICRO_BATCH_BYTES = 2000  # that each micro-batch keeps until the end of the update; 1,830 to 1,860 were measured
REPRESENTATION_BYTES = 2400  # of a micro-batch's representations, as leaves of a coupled loss: about 1,200 each, of two
NORM_BYTES = 800  # of the statistics of one BatchNorm and one micro-batch: an estimate
UNCOPYABLE = (TypeError, RuntimeError, AttributeError, NotImplementedError)  # raised by deepcopy


@dataclass(frozen=True, slots=True)
class TrialSetup:
    """The parts of an update to try, its device and options."""

    parts: Parts
    device: torch.device
    batch_bytes: int  # bytes of the whole batch if it lies on the device, else 0
    batch_on_host: bool  # True if micro-batches are moved to the device one by one
    options: UpdateOptions  # options of `Update`, or of `Accumulator` without an optimizer
    is_in_place: bool  # True if real trials run on the parts themselves and are undone; else they run on copies

    @property
    def is_coupled(self) -> bool:
        return isinstance(self.parts[2], Coupled)

    @property
    def is_exact(self) -> bool:
        """True if all micro-batches run in lockstep, so that their graphs are alive together."""
        norms = batch_norms(self.parts[0]).values()
        return self.options.batch_norm == "exact" and any(map(uses_batch_statistics, norms))

    @property
    def num_norms(self) -> int:
        return len(batch_norms(self.parts[0]))

    @property
    def outside_each(self) -> int:
        """Bytes that each micro-batch keeps outside torch's allocator."""
        if not self.is_coupled:
            return MICRO_BATCH_BYTES
        return MICRO_BATCH_BYTES + REPRESENTATION_BYTES + NORM_BYTES * self.num_norms * (not self.is_exact)


class Probe:
    """Runs updates of `parts` by `Update`, or by `Accumulator` without an optimizer."""

    def __init__(self, setup: TrialSetup, parts: Parts, objective: Objective | Coupled) -> None:
        self._setup, self.parts = setup, parts
        self.num_nodes = 0  # nodes in the graph of one micro-batch; 0 before the first trial
        model, optimizer, _ = parts
        # fake tensors have no numbers to check for inf or to measure noise by; dropping takes a second set of gradients
        options = replace(
            setup.options,
            batch_norm=setup.options.batch_norm or "micro",
            on_nonfinite="drop" if setup.options.drops else "ignore",
            noise=None,
        )
        self._run: Any
        if optimizer is None:
            self._learner: Accumulator | Update = Accumulator(model, objective, micro_batch=1, options=options)
            self._run = self._learner.backward
        else:
            self._learner = Update(model, optimizer, objective, micro_batch=1, options=options, check="off")
            self._run = self._learner
        self._objective = objective

    def _parameters(self) -> list[nn.Parameter]:
        """Return the parameters of model and loss, with gradients reset.

        They become zeros if the caller's `Accumulator` adds to existing gradients, else None.
        """
        model, optimizer, _ = self._setup.parts
        found = [*dict.fromkeys([*self._learner.parameters(), *self._objective.parameters()])]
        drop_gradients(found)
        adds = optimizer is None and any(parameter.grad is not None for parameter in model.parameters())
        for parameter in found if adds else ():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        return found

    def _count_nodes(self, recorder: Recorder, num_micro_batches: int) -> int:
        all_first = self._setup.is_exact or self._setup.is_coupled  # every forward runs before the first backward
        return recorder.num_forward_ops // (num_micro_batches if all_first else 1)

    def _timeline(self, ops: Iterable[str], live: Iterable[int], num_micro_batches: int) -> Timeline:
        """Add the bytes outside torch's allocator, which lie on the host: only for a plan on the CPU."""
        outside = 0
        if self._setup.device.type == "cpu":
            graphs = num_micro_batches if self._setup.is_exact else 1
            outside = NODE_BYTES * self.num_nodes * graphs + self._setup.outside_each * num_micro_batches
        return Timeline(tuple(ops), tuple(nbytes + outside for nbytes in live))


class FakeProbe(Probe):
    """Runs updates on fake tensors, and keeps the last recording."""

    def __init__(self, setup: TrialSetup, *first: Batch) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        memo = {id(tensor): _fake_like(tensor, self._mode) for tensor in _large_tensors(setup.parts)}
        with _Fakes(self._mode):
            model, optimizer, objective = _copied(setup.parts, memo)
        if optimizer is not None and setup.device.type != "cpu":
            _choose_foreach(optimizer)
        # rows as units: fake tensors have no targets to count, and shares take no memory
        counting = {"units": rows} if isinstance(objective, Coupled) else {"units": rows, "units_for": None}
        super().__init__(setup, (model, optimizer, objective), replace(objective, **counting))
        self.recorder = Recorder([])
        for _ in range(FIRST_RUNS):
            self._run_fake(self._fake(first))

    def __call__(self, *micro_batches: Batch) -> Timeline:
        model, optimizer, _ = self.parts
        with self._mode:
            parameters = self._parameters()
        faked = self._fake(micro_batches)
        standing: list[tuple[str, Tensor]] = [
            *(("parameters", one) for one in (*parameters, *model.buffers())),
            *(("optimizer", one) for one in optimizer_tensors(optimizer)),
            *(("gradients", one.grad) for one in parameters if one.grad is not None),
        ]
        self.recorder = Recorder(standing, uncounted=tensors(faked), batch_bytes=self._setup.batch_bytes)
        hooks = self.recorder.watch_gradients(parameters)
        try:
            self._run_fake(faked, self.recorder)
        finally:
            for hook in hooks:
                hook.remove()
        self.num_nodes = self._count_nodes(self.recorder, len(faked))
        return self._timeline(self.recorder.ops, self.recorder.live, len(faked))

    @property
    def hidden_op(self) -> str | None:
        """Name of an op that ran with a CPU kernel that allocates more than its tensors show, or None."""
        if self._setup.options.autocast is not None or any(map(is_low, self.parts[0].parameters())):
            return "matrix products in bf16 or fp16"
        return next((HIDDEN[name] for op in self.recorder.ops if (name := op.split(".")[0]) in HIDDEN), None)

    def _fake(self, micro_batches: tuple[Batch, ...]) -> tuple[Batch, ...]:
        device = UNCOUNTED_DEVICE if self._setup.batch_on_host else "cpu"
        return tuple(map_tensors(one, lambda each: _fake_like(each, self._mode, device)) for one in micro_batches)

    def _run_fake(self, faked: tuple[Batch, ...], recorder: Recorder | None = None) -> None:
        with _without_warnings(), _choosing_as_real(faked), self._mode, recorder or nullcontext():
            self._run(MicroBatches(faked))


class RealProbe(Probe):
    """Runs real updates under the profiler, which also sees what kernels allocate.

    They run in place and are undone by `undo`, because a copy would need the memory that is planned for. Parts on another
    device, or with hooks, are copied. Running out of memory raises: an update with half the rows would say nothing.
    """

    def __init__(self, setup: TrialSetup, undo: ExitStack) -> None:
        parts = setup.parts
        if setup.is_in_place:
            undo.enter_context(_undone(parts))
        else:
            parts = _copied(parts, {})
            parts[0].to(setup.device)
        super().__init__(setup, parts, parts[2])

    def __call__(self, *micro_batches: Batch) -> Timeline:
        """Return the timeline of one update, by allocations instead of ops."""
        setup, (model, optimizer, _) = self._setup, self.parts
        there = micro_batches if setup.batch_on_host else tuple(move(one, setup.device) for one in micro_batches)
        if not self.num_nodes:
            recorder = Recorder([])
            with _without_warnings():
                for run in range(FIRST_RUNS):
                    with recorder if run == FIRST_RUNS - 1 else nullcontext():
                        self._run(MicroBatches(there, whole=True))
            self.num_nodes = max(self._count_nodes(recorder, len(there)), 1)
        parameters = self._parameters()
        gc.collect()
        gradients = [one.grad for one in parameters if one.grad is not None]
        held = bytes_of([*parameters, *model.buffers(), *optimizer_tensors(optimizer), *gradients]) + setup.batch_bytes
        with _without_warnings():
            seen = metered(lambda: self._run(MicroBatches(there, whole=True)), setup.device.type)
        changes = [nbytes for _, nbytes in seen.allocations]
        names = ("allocated" if nbytes > 0 else "freed" for nbytes in changes)
        return self._timeline(names, [*accumulate(changes, initial=held)][1:], len(there))


def is_watched(model: nn.Module) -> bool:
    """Return True if parameters have hooks, which trials in place would call."""
    return any(any(gradient_hooks_of(parameter)) for parameter in model.parameters())


def is_real(parts: Parts, batch: Batch) -> bool:
    """Return True if every tensor holds data, so that a real update can run."""
    return not any(map(_is_without_data, (*parts[0].parameters(), *parts[0].buffers(), *tensors(batch))))


class _Fakes(TorchFunctionMode):
    """A mode in which `copy.deepcopy` of a tensor makes a fake one on the CPU."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._mode = mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            tensor, memo = args
            memo[id(tensor)] = fake = _fake_like(tensor, self._mode)
            return fake
        return func(*args, **(kwargs or {}))


def _fake_like(tensor: Tensor, mode: FakeTensorMode, device: str = "cpu") -> Tensor:
    """Make a fake tensor of this shape and dtype. A scalar keeps its value, which optimizers read their step from."""
    if tensor.layout is not torch.strided:
        raise NotImplementedError(f"a tensor with layout {tensor.layout} cannot be planned with fake tensors")
    has_number = tensor.dim() == 0 and not _is_without_data(tensor) and device == "cpu"
    number = tensor.detach().item() if has_number else None
    with mode:
        if number is not None:
            fake = torch.tensor(number, dtype=tensor.dtype)
        else:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        if isinstance(tensor, nn.Parameter):
            fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
        elif tensor.requires_grad and tensor.is_leaf:
            fake.requires_grad_()
    return fake


def _is_without_data(tensor: Tensor) -> bool:
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def _copied(parts: Parts, memo: dict[int, Any]) -> Parts:
    try:
        return copy.deepcopy(parts, dict(memo))
    except UNCOPYABLE as error:
        shared = _shared(parts)
        if shared:
            return copy.deepcopy(parts, {**memo, **shared})
        model, optimizer, _ = parts
        raise PlanError(
            f"planning tries an update on a copy, but this {type(model).__name__} with {type(optimizer).__name__} cannot be "
            f"copied by copy.deepcopy: {error}. Give plan() a model that can be, such as one made anew."
        ) from error


def _shared(parts: Parts) -> dict[int, Any]:
    """Find attributes of modules that cannot be copied, such as locks, without copying tensors. Copies will share them."""
    known = {id(tensor): tensor for tensor in _large_tensors(parts)}
    found: dict[int, Any] = {}
    for module in (module for top in _modules(parts) for module in top.modules()):
        for value in vars(module).values():
            if isinstance(value, dict | nn.Module | Tensor):
                continue
            try:
                copy.deepcopy(value, dict(known))
            except UNCOPYABLE:
                found[id(value)] = value
    return found


def _modules(parts: Parts) -> list[nn.Module]:
    loss = getattr(parts[2], "loss", None)
    return [parts[0], loss] if isinstance(loss, nn.Module) else [parts[0]]


def _large_tensors(parts: Parts) -> Iterator[Tensor]:
    for module in _modules(parts):
        yield from module.parameters()
        yield from module.buffers()
    for group in () if parts[1] is None else parts[1].param_groups:
        yield from group["params"]


@contextmanager
def _undone(parts: Parts) -> Iterator[None]:
    """Restore parameters, buffers, gradients, the optimizer and Python state after the block.

    Copies are spilled to disk, or from an accelerator to the host. Gradients are None inside.
    """
    model, optimizer, objective = parts
    large = list(dict.fromkeys(_large_tensors(parts)))
    # .data: restoring must not count as a write by the model's forward
    before = replace(
        Snapshot.of([one.data for one in large], optimizer=optimizer, spill=True),
        buffers={(one, name): (held, None) for one in model.modules() for name, held in buffers_of(one).items()},
    )
    gradients = [(one, one.grad) for one in large]
    python = PythonState(model, *functions_of(objective), owned=[*model.modules()])
    for one in large:
        one.grad = None
    try:
        yield
    finally:
        for one in large:
            one.grad = None  # makes room for the copies
        before.put_back()
        for one, gradient in gradients:
            one.grad = gradient
        python.put_back()


def _choose_foreach(optimizer: Optimizer) -> None:
    """Step over all parameters at once by default, as torch does on a GPU."""
    for group in optimizer.param_groups:
        is_open = "foreach" in group and group["foreach"] is None and not group.get("fused")
        if is_open and not group.get("differentiable"):
            group["foreach"] = True


@contextmanager
def _choosing_as_real(micro_batches: Iterable[Batch]) -> Iterator[None]:
    """Make transformers leave out the attention mask inside the block, as in a real run.

    A real run reads from the position ids that each row is one sequence, and needs no mask. With fake tensors transformers
    cannot tell, makes a mask, and repeats keys and values. Batches with `position_ids` keep the mask: an upper bound.
    """
    masking = sys.modules.get("transformers.masking_utils")
    own = getattr(masking, "find_packed_sequence_indices", None)
    brings_none = all(isinstance(one, Mapping) and "position_ids" not in one for one in micro_batches)
    if masking is None or own is None or not brings_none:
        yield
        return
    masking.find_packed_sequence_indices = lambda position_ids: None  # type: ignore[attr-defined]
    try:
        yield
    finally:
        masking.find_packed_sequence_indices = own  # type: ignore[attr-defined]


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Silence warnings: the model will warn again when it trains."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield

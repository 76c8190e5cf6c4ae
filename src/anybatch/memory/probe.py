"""One update of a copy, to see what it allocates: on fake tensors, which take no memory, or on a few real rows."""

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
from anybatch.memory.recorder import ELSEWHERE, Recorder, Timeline
from anybatch.verification import PythonState, functions_of

Parts = tuple[nn.Module, Optimizer | None, Any]
"""Model, optimizer and objective: copied together, so that what they share stays shared."""
HIDDEN = {
    "aten::convolution": "a convolution",
    "aten::mkldnn_rnn_layer": "an LSTM",
    "aten::lstm": "an LSTM",
    "aten::gru": "a GRU",
}
"""Ops whose CPU kernels allocate what no tensor shows."""
FIRST_RUNS = 2
"""Updates before the first that is recorded: they fill the optimizer's state, and their steps are copied and watched."""
NODE_BYTES = 1000
"""Bytes of a node of the graph and its tensors, beside their numbers, outside torch's allocator: 840 to 910 were counted."""
MICRO_BATCH_BYTES = 2000
"""Bytes that each micro-batch leaves there until the end of the update: 1,830 to 1,860 were counted."""
REPRESENTATION_BYTES = 2400
"""Bytes of a micro-batch's representations there, as leaves of a coupled loss's graph: some 1,200 each, of two."""
NORM_BYTES = 800
"""Bytes of the statistics of one BatchNorm and one micro-batch there: estimated, not counted."""
UNCOPYABLE = (TypeError, RuntimeError, AttributeError, NotImplementedError)
"""Errors that deepcopy raises for what it cannot copy."""


@dataclass(frozen=True, slots=True)
class TrialSetup:
    """The parts of an update to try, and where it is to run."""

    parts: Parts
    device: torch.device
    batch_bytes: int
    """The whole batch, where it lies in the memory that is planned; else 0."""
    is_elsewhere: bool
    """True where micro-batches are brought to the device one by one."""
    options: UpdateOptions
    """The options of `Update`, or of `Accumulator` where there is no optimizer."""
    is_in_place: bool
    """True where real trials may run on the parts themselves, and are undone; else they run on copies."""

    @property
    def is_coupled(self) -> bool:
        """True where the loss sees all rows."""
        return isinstance(self.parts[2], Coupled)

    @property
    def is_exact(self) -> bool:
        """True where all micro-batches run in lockstep, and their graphs live side by side."""
        norms = batch_norms(self.parts[0]).values()
        return self.options.batch_norm == "exact" and any(map(uses_batch_statistics, norms))

    @property
    def num_norms(self) -> int:
        """How many layers are BatchNorms."""
        return len(batch_norms(self.parts[0]))

    @property
    def outside_each(self) -> int:
        """Bytes that each micro-batch leaves outside torch's allocator, where it runs with all others."""
        if not self.is_coupled:
            return MICRO_BATCH_BYTES
        return MICRO_BATCH_BYTES + REPRESENTATION_BYTES + NORM_BYTES * self.num_norms * (not self.is_exact)


class Probe:
    """Runs updates of `parts`: the real path of `Update`, or of `Accumulator` where there is no optimizer."""

    def __init__(self, setup: TrialSetup, parts: Parts, objective: Objective | Coupled) -> None:
        self._setup, self.parts = setup, parts
        self.num_nodes = 0
        """Nodes in the graph of one micro-batch; 0 before the first trial."""
        model, optimizer, _ = parts
        # whether a gradient is finite, and its noise, need its numbers; looking takes no memory, dropping a set of gradients
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
        """Parameters of the model and of the loss, their gradients as they are before a trial.

        Zeros where the caller's `Accumulator` adds to gradients that are there already, else none.
        """
        model, optimizer, _ = self._setup.parts
        found = [*dict.fromkeys([*self._learner.parameters(), *self._objective.parameters()])]
        drop_gradients(found)
        adds = optimizer is None and any(parameter.grad is not None for parameter in model.parameters())
        for parameter in found if adds else ():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        return found

    def _count_nodes(self, recorder: Recorder, num_micro_batches: int) -> int:
        all_first = self._setup.is_exact or self._setup.is_coupled  # every forward before the first backward pass
        return recorder.num_forward_ops // (num_micro_batches if all_first else 1)

    def _timeline(self, ops: Iterable[str], live: Iterable[int], num_micro_batches: int) -> Timeline:
        """With what lies outside torch's allocator; a plan for an accelerator does not count what lies on the host."""
        outside = 0
        if self._setup.device.type == "cpu":
            graphs = num_micro_batches if self._setup.is_exact else 1
            outside = NODE_BYTES * self.num_nodes * graphs + self._setup.outside_each * num_micro_batches
        return Timeline(tuple(ops), tuple(nbytes + outside for nbytes in live))


class FakeProbe(Probe):
    """Updates of fake tensors: every op of them, and no memory. Keeps the last recording."""

    def __init__(self, setup: TrialSetup, *first: Batch) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        memo = {id(tensor): _fake_like(tensor, self._mode) for tensor in _large_tensors(setup.parts)}
        with _Fakes(self._mode):
            model, optimizer, objective = _copied(setup.parts, memo)
        if optimizer is not None and setup.device.type != "cpu":
            _choose_foreach(optimizer)
        # rows for units: counting targets needs their numbers, and shares take no memory
        counting = {"units": rows} if isinstance(objective, Coupled) else {"units": rows, "units_for": None}
        super().__init__(setup, (model, optimizer, objective), replace(objective, **counting))
        self.recorder = Recorder([])
        for _ in range(FIRST_RUNS):
            self._run_fake(self._fake(first))

    def __call__(self, *micro_batches: Batch) -> Timeline:
        """The timeline of one update of these micro-batches."""
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
    def hidden(self) -> str | None:
        """In words, an op that ran and whose CPU kernel allocates more than its tensors show; None where there was none."""
        if self._setup.options.autocast is not None or any(map(is_low, self.parts[0].parameters())):
            return "matrix products in bf16 or fp16"
        return next((HIDDEN[name] for op in self.recorder.ops if (name := op.split(".")[0]) in HIDDEN), None)

    def _fake(self, micro_batches: tuple[Batch, ...]) -> tuple[Batch, ...]:
        device = ELSEWHERE if self._setup.is_elsewhere else "cpu"  # where memory is not counted
        return tuple(map_tensors(one, lambda each: _fake_like(each, self._mode, device)) for one in micro_batches)

    def _run_fake(self, faked: tuple[Batch, ...], recorder: Recorder | None = None) -> None:
        with _without_warnings(), _choosing_as_real(faked), self._mode, recorder or nullcontext():
            self._run(MicroBatches(faked))


class RealProbe(Probe):
    """Real updates, read through the profiler: what kernels allocate inside is seen too.

    They run in place, on what `undo` puts back: a copy would need the memory that is planned for. Parts that lie elsewhere, or
    that others watch, are copied. Where memory runs out, that is an error: half the rows would say nothing of all.
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
        """The timeline of one update of these micro-batches: allocations, not ops."""
        setup, (model, optimizer, _) = self._setup, self.parts
        there = micro_batches if setup.is_elsewhere else tuple(move(one, setup.device) for one in micro_batches)
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
    """True where somebody has hooks on parameters, which trials in place would call."""
    return any(any(gradient_hooks_of(parameter)) for parameter in model.parameters())


def is_real(parts: Parts, batch: Batch) -> bool:
    """True where every tensor holds numbers, so that it could really run."""
    return not any(map(_is_without_data, (*parts[0].parameters(), *parts[0].buffers(), *tensors(batch))))


class _Fakes(TorchFunctionMode):
    """Inside this block copying a tensor makes a fake one, on the CPU, wherever the tensor lies."""

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
    """A fake tensor of this shape and dtype; a single number keeps its value, which optimizers read their step from."""
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
    """Attributes of modules that nobody can copy, such as locks: copies have the same ones. No tensor is copied to find out."""
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
    """The model, and the loss where it is a module."""
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
    """The block after which parameters, buffers, gradients, the optimizer and what Python code can reach are as they were.

    Copies lie aside: on disk, or from an accelerator on the host. Gradients are None inside.
    """
    model, optimizer, objective = parts
    large = list(dict.fromkeys(_large_tensors(parts)))
    # .data: what is put back does not count as a write, which would be told as one of the model's forward
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
            one.grad = None  # makes room for what is read back
        before.put_back()
        for one, gradient in gradients:
            one.grad = gradient
        python.put_back()


def _choose_foreach(optimizer: Optimizer) -> None:
    """Let the step of fake tensors on the CPU run as a GPU's would: over all parameters at once, unless told otherwise."""
    for group in optimizer.param_groups:
        is_open = "foreach" in group and group["foreach"] is None and not group.get("fused")
        if is_open and not group.get("differentiable"):
            group["foreach"] = True


@contextmanager
def _choosing_as_real(micro_batches: Iterable[Batch]) -> Iterator[None]:
    """Inside this block transformers leaves the mask of attention out where a real run would.

    Positions that a model counts itself are those of one sequence a row. A real run reads that off their numbers, and needs no
    mask; fake tensors are not asked: a mask is made, and keys and values are repeated to go with it. Batches that bring
    positions are planned with the mask: an upper bound.
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
    """Inside this block warnings are silent, because the model will warn again when it trains."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield

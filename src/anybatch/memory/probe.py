"""One update of a copy, to see what it allocates: on fake tensors, which take no memory, or on a few real rows."""

import gc
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import nn
from torch.optim import Optimizer

from anybatch.batch_norm import uses_batch_statistics
from anybatch.core import (
    Accumulator,
    Batch,
    BatchNormLayer,
    Coupled,
    FakeTensorMode,
    MicroBatches,
    Objective,
    OnNonFinite,
    Running,
    Update,
    is_low,
    move,
    rows,
    tensors,
)
from anybatch.memory.meter import bytes_of, drop_gradients, metered, optimizer_tensors
from anybatch.memory.recorder import MemoryKind, Recorder, Timeline
from anybatch.memory.trial_copies import Parts, choosing_as_real, fake_batch, fake_copies, real_copies, undone

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
"""What a node of the graph and its tensors take beside their numbers, outside torch's allocator: 840 to 910 were counted."""
MICRO_BATCH_BYTES = 2000
"""What each micro-batch leaves there until the end of the update: 1,830 to 1,860 were counted."""
REPRESENTATION_BYTES = 2400
"""What the representations of a micro-batch take there as leaves of a coupled loss's graph: some 1,200 each, of two."""
NORM_BYTES = 800
"""What the statistics of one BatchNorm and one micro-batch take there: estimated, not counted."""


@dataclass(frozen=True, slots=True)
class TrialSetup:
    """What is tried: the parts of an update, and where it is to run."""

    parts: Parts
    device: torch.device
    batch_bytes: int
    """The whole batch, where it lies in the memory that is planned; else 0."""
    is_elsewhere: bool
    """True where micro-batches are brought to the device one by one."""
    running: Running = field(default_factory=Running)
    """The options of `Update`, or of `Accumulator` where there is no optimizer."""
    is_in_place: bool = False
    """True where real trials may run on the parts themselves, and are undone; else they run on copies."""

    @property
    def is_coupled(self) -> bool:
        """True where the loss sees all rows."""
        return isinstance(self.parts[2], Coupled)

    @property
    def is_exact(self) -> bool:
        """True where all micro-batches run in lockstep, and their graphs live side by side."""
        return self.running.batch_norm == "exact" and any(
            isinstance(module, BatchNormLayer) and uses_batch_statistics(module) for module in self.parts[0].modules()
        )

    @property
    def num_norms(self) -> int:
        """How many layers are BatchNorms."""
        return sum(isinstance(module, BatchNormLayer) for module in self.parts[0].modules())

    @property
    def outside_each(self) -> int:
        """Bytes that each micro-batch leaves outside torch's allocator, where it runs with all others."""
        if not self.is_coupled:
            return MICRO_BATCH_BYTES
        return MICRO_BATCH_BYTES + REPRESENTATION_BYTES + NORM_BYTES * self.num_norms * (not self.is_exact)

    @property
    def runs_all_first(self) -> bool:
        """True where every micro-batch runs forward before the first backward pass."""
        return self.is_exact or self.is_coupled

    @property
    def adds(self) -> bool:
        """True where gradients are there already, which the caller's `Accumulator` adds to."""
        model, optimizer, _ = self.parts
        return optimizer is None and any(parameter.grad is not None for parameter in model.parameters())


class FakeProbe:
    """Updates of fake tensors: the real path of `Update`, every op of it, and no memory. Keeps the last recording."""

    def __init__(self, setup: TrialSetup, *first: Batch) -> None:
        self._setup = setup
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.parts = fake_copies(setup.parts, self._mode)
        model, optimizer, objective = self.parts
        if optimizer is not None and setup.device.type != "cpu":
            _choose_foreach(optimizer)
        self._runner = _runner((model, optimizer, _counting_rows(objective)), setup.running)
        self.recorder = Recorder([])
        self.num_nodes = 0
        """Nodes in the graph of one micro-batch."""
        for _ in range(FIRST_RUNS):
            self._run(MicroBatches(self._fake(first)))

    def __call__(self, *micro_batches: Batch) -> Timeline:
        model, optimizer, _ = self.parts
        parameters = self._runner.parameters()
        drop_gradients(parameters)
        faked = self._fake(micro_batches)
        standing: list[tuple[MemoryKind, torch.Tensor]] = [
            ("parameters", one) for one in (*parameters, *model.buffers())
        ]
        standing += [("optimizer", one) for one in ([] if optimizer is None else optimizer_tensors(optimizer))]
        with self._mode:
            standing += [("gradients", one) for one in _gradients_there(self._setup, parameters)]
        self.recorder = Recorder(standing, uncounted=tensors(faked), batch_bytes=self._setup.batch_bytes)
        hooks = self.recorder.watch_gradients(parameters)
        try:
            self._run(MicroBatches(faked), self.recorder)
        finally:
            for hook in hooks:
                hook.remove()
        self.num_nodes = self.recorder.num_forward_ops // (len(faked) if self._setup.runs_all_first else 1)
        return _with_outside(self.recorder.timeline, self._setup, self.num_nodes, len(faked))

    @property
    def hidden(self) -> str | None:
        """In words, an op that ran and whose CPU kernel allocates more than its tensors show; None where there was none."""
        if self._setup.running.autocast is not None or any(
            is_low(parameter) for parameter in self.parts[0].parameters()
        ):
            return "matrix products in bf16 or fp16"
        return next((HIDDEN[op.split(".")[0]] for op in self.recorder.ops if op.split(".")[0] in HIDDEN), None)

    def _fake(self, micro_batches: tuple[Batch, ...]) -> tuple[Batch, ...]:
        return tuple(fake_batch(one, self._mode, is_elsewhere=self._setup.is_elsewhere) for one in micro_batches)

    def _run(self, batch: MicroBatches, recorder: Recorder | None = None) -> None:
        with _without_warnings(), choosing_as_real(batch), self._mode:
            if recorder is None:
                self._runner.run(batch)
                return
            with recorder:
                self._runner.run(batch)


class RealProbe:
    """Real updates, read through the profiler: what kernels allocate inside is seen too.

    They run in place, on what `undo` puts back: a copy would need the memory that is planned for. Parts that lie elsewhere, or
    that others watch, are copied. Where memory runs out, that is an error: half the rows would say nothing of all.
    """

    def __init__(self, setup: TrialSetup, undo: ExitStack) -> None:
        self._setup = setup
        self.parts = setup.parts if setup.is_in_place else real_copies(setup.parts, setup.device)
        if setup.is_in_place:
            undo.enter_context(undone(setup.parts))
        self._runner = _runner(self.parts, setup.running)
        self.num_nodes = 0

    def __call__(self, *micro_batches: Batch) -> Timeline:
        setup, (model, optimizer, _) = self._setup, self.parts
        there = micro_batches if setup.is_elsewhere else tuple(move(one, setup.device) for one in micro_batches)
        parameters = self._runner.parameters()
        if not self.num_nodes:
            self._first_runs(there)
        drop_gradients(parameters)
        gc.collect()
        state = [] if optimizer is None else optimizer_tensors(optimizer)
        there_already = _gradients_there(setup, parameters)
        standing = bytes_of([*parameters, *model.buffers(), *state, *there_already]) + setup.batch_bytes
        with _without_warnings():
            seen = metered(lambda: self._runner.run(MicroBatches(there, whole=True)), setup.device.type)
        changes = [nbytes for _, nbytes in seen.allocations]
        names = tuple("allocated" if nbytes > 0 else "freed" for nbytes in changes)
        timeline = Timeline(names, tuple(accumulate(changes, initial=standing))[1:])
        return _with_outside(timeline, setup, self.num_nodes, len(there))

    def _first_runs(self, there: tuple[Batch, ...]) -> None:
        recorder = Recorder([])
        with _without_warnings():
            for _ in range(FIRST_RUNS - 1):
                self._runner.run(MicroBatches(there, whole=True))
            with recorder:
                self._runner.run(MicroBatches(there, whole=True))
        self.num_nodes = max(recorder.num_forward_ops // (len(there) if self._setup.runs_all_first else 1), 1)


Probe = FakeProbe | RealProbe
"""Called with micro-batches, it runs an update of them on `parts`, and returns its timeline."""


@dataclass(frozen=True, slots=True)
class _Runner:
    """An update, or a gradient alone, of copies."""

    update: Update | Accumulator

    def run(self, batch: MicroBatches) -> None:
        if isinstance(self.update, Update):
            self.update(batch)
        else:
            self.update.backward(batch)

    def parameters(self) -> list[nn.Parameter]:
        found = list(self.update.parameters())
        objective = (self.update.accumulator if isinstance(self.update, Update) else self.update).objective
        return list(dict.fromkeys([*found, *objective.parameters()]))


def _with_outside(timeline: Timeline, setup: TrialSetup, num_nodes: int, num_micro_batches: int) -> Timeline:
    """With what lies outside torch's allocator; a plan for an accelerator does not count what lies on the host."""
    if setup.device.type != "cpu":
        return timeline
    graphs = num_micro_batches if setup.is_exact else 1
    outside = NODE_BYTES * num_nodes * graphs + setup.outside_each * num_micro_batches
    return Timeline(timeline.ops, tuple(live + outside for live in timeline.live))


def _gradients_there(setup: TrialSetup, parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    """Gradients as they are before the trial: zeros where some are there already, else none."""
    for parameter in parameters if setup.adds else ():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _runner(parts: Parts, running: Running) -> _Runner:
    model, optimizer, objective = parts
    # whether a gradient is finite, and its noise, need its numbers; looking takes no memory, dropping a second set of gradients
    on_nonfinite: OnNonFinite = "drop" if running.drops else "ignore"
    running = replace(running, batch_norm=running.batch_norm or "micro", on_nonfinite=on_nonfinite, noise=None)
    if optimizer is None:
        return _Runner(Accumulator(model, objective, micro_batch=1, running=running))
    return _Runner(Update(model, optimizer, objective, micro_batch=1, running=running, check="off"))


def _counting_rows(objective: Objective | Coupled) -> Objective | Coupled:
    """The same loss with rows for units: counting targets needs their numbers, and shares take no memory."""
    if isinstance(objective, Coupled):
        return replace(objective, units=rows)
    return replace(objective, units=rows, units_for=None)


def _choose_foreach(optimizer: Optimizer) -> None:
    """Let the step of fake tensors on the CPU run as a GPU's would: over all parameters at once, unless told otherwise."""
    for group in optimizer.param_groups:
        is_open = "foreach" in group and group["foreach"] is None and not group.get("fused")
        if is_open and not group.get("differentiable"):
            group["foreach"] = True


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Inside this block warnings are silent, because the model will warn again when it trains."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield

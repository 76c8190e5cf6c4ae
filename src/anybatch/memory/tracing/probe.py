"""One update of a copy, to see what it allocates: on fake tensors, which take no memory, or on a few real rows."""

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from anybatch.batches import Batch, MicroBatches, move, rows, tensors
from anybatch.low_precision import is_low
from anybatch.memory.tracing.meter import bytes_of, drop_gradients, metered, optimizer_tensors
from anybatch.memory.tracing.moments import MemoryKind
from anybatch.memory.tracing.recorder import Recorder, Timeline
from anybatch.memory.tracing.trial_copies import Parts, fake_batch, fake_copies, real_copies
from anybatch.objectives import Coupled, Objective
from anybatch.options import OnNonFinite
from anybatch.passes import Accumulator, Running
from anybatch.torch_inside import FakeTensorMode
from anybatch.update import Update

HIDDEN = {
    "aten::convolution": "a convolution",
    "aten::mkldnn_rnn_layer": "an LSTM",
    "aten::lstm": "an LSTM",
    "aten::gru": "a GRU",
}
"""Ops whose CPU kernels allocate what no tensor shows."""
FIRST_RUNS = 2
"""Updates before the first that is recorded: they fill the optimizer's state, and their steps are copied and watched."""


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

    @property
    def adds(self) -> bool:
        """True where gradients are there already, which the caller's `Accumulator` adds to."""
        model, optimizer, _ = self.parts
        return optimizer is None and any(parameter.grad is not None for parameter in model.parameters())


class Probe(Protocol):
    """Runs an update of these micro-batches on copies of the parts, and gives its timeline."""

    parts: Parts

    def __call__(self, *micro_batches: Batch) -> Timeline: ...


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
        return self.recorder.timeline

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
        with without_warnings(), self._mode:
            if recorder is None:
                self._runner.run(batch)
                return
            with recorder:
                self._runner.run(batch)


class RealProbe:
    """Real updates of a real copy, read through the profiler: what kernels allocate inside is seen too."""

    def __init__(self, setup: TrialSetup, *first: Batch) -> None:
        self._setup = setup
        self.parts = real_copies(setup.parts, setup.device)
        self._runner = _runner(self.parts, setup.running)
        with without_warnings():
            for _ in range(FIRST_RUNS):
                self._runner.run(MicroBatches(first))

    def __call__(self, *micro_batches: Batch) -> Timeline:
        setup, (model, optimizer, _) = self._setup, self.parts
        there = micro_batches if setup.is_elsewhere else tuple(move(one, setup.device) for one in micro_batches)
        parameters = self._runner.parameters()
        drop_gradients(parameters)
        gc.collect()
        state = [] if optimizer is None else optimizer_tensors(optimizer)
        there_already = _gradients_there(setup, parameters)
        standing = bytes_of([*parameters, *model.buffers(), *state, *there_already]) + setup.batch_bytes
        with without_warnings():
            seen = metered(lambda: self._runner.run(MicroBatches(there)), setup.device.type)
        changes = [nbytes for _, nbytes in seen.allocations]
        names = tuple("allocated" if nbytes > 0 else "freed" for nbytes in changes)
        return Timeline(names, tuple(accumulate(changes, initial=standing))[1:])


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
def without_warnings() -> Iterator[None]:
    """Inside this block warnings are silent, because the model will warn again when it trains."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield

"""Real passes, timed in place and undone; and whether a way of running them leaves the same gradient."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from time import perf_counter

import torch
from torch import Tensor

from anybatch.batches import Batch, MicroBatches
from anybatch.device_memory import has_counters
from anybatch.errors import PlanError
from anybatch.events import Backward, Event, Loss
from anybatch.memory.tracing import Parts, drop_gradients, keeping_random_states, undone, without_warnings
from anybatch.passes import Accumulator, Running
from anybatch.proof import PythonState, functions_of
from anybatch.state import TensorFile, kept_aside, outer_random, random_state
from anybatch.torch_inside import num_writes

Switch = Callable[[], AbstractContextManager[object]]
"""What gives the block in which the model runs some way."""
Gradient = list[Callable[[], Tensor] | None]
"""That of each parameter, kept aside."""


class RealPasses:
    """Forward and backward of micro-batches on the model itself, by the path that an update takes.

    Afterwards buffers, gradients, random states and what Python code can reach are as they were. Nothing is stepped, so that
    parameters do not change.
    """

    def __init__(self, parts: Parts, running: Running, device: torch.device) -> None:
        model, _, objective = parts
        self._parts: Parts = (model, None, objective)
        self._device = device
        quiet = replace(running, batch_norm=running.batch_norm or "micro", on_nonfinite="ignore", noise=None)
        self._accumulator = Accumulator(model, objective, micro_batch=1, running=quiet)
        self._parameters = [*model.parameters(), *objective.parameters()]

    def seconds(self, switch: Switch, micro_batch: Batch) -> float:
        """What one pass takes."""
        with self._undone():
            return self._run(switch, micro_batch)

    def check_same(self, switch: Switch, micro_batches: Sequence[Batch], *, is_plain_possible: bool) -> None:
        """Refuse a way in which backward changes what forward alone should, or whose gradient is not that of plain passes.

        Where plain passes do not fit, gradients are not compared.
        """
        file = TensorFile()
        changed: list[str] = []
        gradient = self._gradient(switch, micro_batches, file, _Watch(self._parts, changed))
        if changed:
            raise PlanError(f"running a block again in backward changes {', '.join(changed[:3])}")
        if not is_plain_possible:
            return
        plain = self._gradient(ExitStack, micro_batches, file)
        error, most = _relative_error(gradient, plain), max(_allowed(one) for one in self._parameters)
        if not error <= most:
            raise PlanError(f"its gradient is off by {error:.2g} of the plain one, where rounding explains {most:.2g}")

    def _gradient(
        self,
        switch: Switch,
        micro_batches: Sequence[Batch],
        file: TensorFile,
        observer: Callable[[Event], None] | None = None,
    ) -> Gradient:
        with self._undone():
            self._accumulator.observer = observer
            try:
                self._run(switch, *micro_batches)
            finally:
                self._accumulator.observer = None
            gradients = [parameter.grad for parameter in self._parameters]
            drop_gradients(self._parameters)
            return [None if one is None else kept_aside(one, file) for one in gradients]

    def _run(self, switch: Switch, *micro_batches: Batch) -> float:
        with switch(), without_warnings():
            self._wait()
            started = perf_counter()
            result = self._accumulator.backward(MicroBatches(micro_batches))
            self._wait()
            took = perf_counter() - started
        if result.retries:
            raise PlanError("memory ran out while passes were measured")
        return took

    def _undone(self) -> ExitStack:
        with ExitStack() as stack:
            stack.enter_context(keeping_random_states())
            stack.enter_context(undone(self._parts, is_stepped=False))
            return stack.pop_all()

    def _wait(self) -> None:
        if has_counters(self._device):
            torch.accelerator.synchronize(self._device)


class _Watch:
    """An observer that notes what changes between the end of a forward and the end of its backward."""

    def __init__(self, parts: Parts, changed: list[str]) -> None:
        self._parts = parts
        self._changed = changed
        self._changes: Callable[[], list[str]] = list

    def __call__(self, event: Event) -> None:
        if isinstance(event, Loss):
            self._changes = self._since_now()
        elif isinstance(event, Backward):
            self._changed += self._changes()

    def _since_now(self) -> Callable[[], list[str]]:
        model, _, objective = self._parts
        writes = {name: num_writes(buffer) for name, buffer in model.named_buffers()}
        python = PythonState(model, *functions_of(objective), owned=[*model.modules()])
        torchs, others = random_state(one.device for one in model.parameters()), outer_random()

        def changes() -> list[str]:
            written = [name for name, buffer in model.named_buffers() if num_writes(buffer) != writes.get(name)]
            drawn = [*others.moved(), *([] if torchs.is_now() else ["torch's random state"])]
            return [*written, *drawn, *python.changed()]

        return changes


def _relative_error(one: Gradient, other: Gradient) -> float:
    """The norm of their difference, as a share of the second's."""
    apart = whole = 0.0
    for left, right in zip(one, other, strict=True):
        if left is None or right is None:
            if left is not right:
                return float("inf")
            continue
        wanted = right().double()
        apart += float((left().double() - wanted).square().sum())
        whole += float(wanted.square().sum())
    return (apart / whole) ** 0.5 if apart else 0.0


def _allowed(parameter: Tensor) -> float:
    return float(torch.finfo(parameter.dtype).eps ** 0.5)

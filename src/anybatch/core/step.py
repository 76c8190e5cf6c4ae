"""Optimizer steps: the first two can be undone; the scale of the loss, and Ctrl-C that waits for the end of a step."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from signal import SIGINT, getsignal, signal
from types import FrameType, TracebackType

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from anybatch.core.out_of_memory import free_memory, is_out_of_memory, once_more
from anybatch.core.snapshot import of_step
from anybatch.core.torch_private import forget_unscaling, overflows
from anybatch.errors import MemoryLimitError, NonFiniteError, first_line

NUM_COPIED = 2
"""Number of steps of each parameter before which a snapshot is taken."""


class Stepping:
    """Steps of one optimizer that leave it intact if memory runs out in the first two.

    A snapshot is taken before the first two steps of every parameter (on an accelerator to the host, on the CPU to disk),
    because they allocate the optimizer's state and need the most memory. If memory runs out in one, the snapshot is restored
    and the step made again, once; after any other error it is restored too.

    An out-of-memory error in a later step is a `MemoryLimitError`: the optimizer's state is inconsistent, and the run has to
    resume from its last checkpoint.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._num_steps: dict[nn.Parameter, int] = {}
        self._is_compiled = type(optimizer).__module__.startswith("torchao.")
        """True if the state of the optimizer cannot be copied."""

    def step(self, act: Callable[[], object]) -> int:
        """Call `act`, which steps the optimizer once.

        Returns:
            1 if memory ran out and the step had to be made again, else 0.
        """
        parameters = (parameter for group in self._optimizer.param_groups for parameter in group["params"])
        moving = [parameter for parameter in parameters if parameter.grad is not None]
        if self._is_compiled or all(self._num_steps.get(parameter, 0) >= NUM_COPIED for parameter in moving):
            self._step_once(act)
            return 0
        retries = self._step_undoably(act, moving)
        self._num_steps.update({parameter: self._num_steps.get(parameter, 0) + 1 for parameter in moving})
        return retries

    def _step_once(self, act: Callable[[], object]) -> None:
        try:
            act()
        except BaseException as error:
            name = type(self._optimizer).__name__
            if not is_out_of_memory(error):
                error.add_note(f"anybatch: raised amid {name}.step, {_TORN}")
                raise
            raise MemoryLimitError(
                f"memory ran out in a step of {name} ({first_line(error)}), and {_TORN} Leave the step more room: "
                "foreach=False or fused=True in the optimizer take the least."
            ) from None

    def _step_undoably(self, act: Callable[[], object], moving: list[nn.Parameter]) -> int:
        before = once_more(lambda: of_step(self._optimizer, moving))
        which = "a" if all(parameter in self._num_steps for parameter in moving) else "the first"
        for attempt in range(2):
            try:
                act()
                return attempt
            except BaseException as error:
                if not is_out_of_memory(error):
                    before.put_back()
                    raise
                reason = first_line(error)
            before.put_back()  # after the except block, whose traceback holds temporaries
            free_memory()
        raise MemoryLimitError(
            f"memory ran out twice in {which} step of {type(self._optimizer).__name__} ({reason}). Weights, optimizer, "
            "scheduler and scaler are as they were. Use an optimizer with less state, foreach=False in it, or a smaller model."
        )


_TORN = "some parameters may have been stepped and others not: the optimizer's state is torn, resume from the last checkpoint."


def change_gradients(action: Callable[[], object], what: str) -> None:
    """Call `action`, which writes to gradients; an out-of-memory error in it leaves only gradients changed, and is final."""
    try:
        action()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise MemoryLimitError(
            f"memory ran out while the gradients were {what} ({first_line(error)}). Weights, optimizer, scheduler and scaler "
            "are as they were, and the batch can be given again. Leave more room beside the gradients: a smaller model, or an "
            "optimizer with less state."
        ) from None


SMALLEST_SCALE = 2.0**-24
"""A loss scale below this has been halved about 36 times in a row: the inf or nan is not an overflow."""


@dataclass(frozen=True, slots=True)
class LossScale:
    """A `GradScaler` and the optimizer it unscales for: unscale once, step through it, move the scale once."""

    scaler: GradScaler
    optimizer: Optimizer

    def make(self, device: torch.device) -> None:
        """Make the scaler's tensors, which it otherwise makes at first use. After an error it has none of them."""
        before = dict(vars(self.scaler))

        def first_use() -> None:
            try:
                self.scaler.scale(torch.zeros((), device=device))
            except BaseException:
                vars(self.scaler).update(before)
                raise

        once_more(first_use)

    def unscale(self) -> None:
        self.scaler.unscale_(self.optimizer)

    def step(self) -> object:
        return self.scaler.step(self.optimizer)

    def update(self, *, is_applied: bool) -> None:
        """Raise or lower the scale after an update that was applied or overflowed."""
        scaler = self.scaler
        if not is_applied:
            # a rank checks its own part of a sharded gradient only, and may not have seen the overflow
            for found in overflows(scaler, self.optimizer):
                found.fill_(1.0)
        once_more(scaler.update)
        if not is_applied and scaler.get_scale() < SMALLEST_SCALE:
            raise NonFiniteError(
                f"the loss scale has fallen to {scaler.get_scale():.3g} and the gradient is still not finite: this is no "
                "overflow, but an inf or nan in the data or the model. Run the batch without a scaler to see which "
                "parameter and micro-batch it comes from."
            )

    def forget(self) -> None:
        """Reset the scaler after an update without a step, so that the next one can unscale."""
        forget_unscaling(self.scaler, self.optimizer)


class HeldInterrupts:
    """Block in which SIGINT waits; the handler of before is called at its end. Only the main thread gets signals."""

    __slots__ = ("_before", "_caught")

    def __init__(self) -> None:
        self._before: object = None
        self._caught: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            before = getsignal(SIGINT)
            if callable(before):  # not SIG_IGN or SIG_DFL, and not set outside of Python
                self._before = before
                signal(SIGINT, self._catch)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        self._caught = number, frame

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        before, self._before = self._before, None
        if callable(before):
            signal(SIGINT, before)
            caught, self._caught = self._caught, None
            if caught is not None:
                before(*caught)

"""Optimizer steps: the first two can be undone, later ones are checked for room before they write anything.

Also the scale of the loss, and Ctrl-C that waits for the end of a step.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from signal import SIGINT, getsignal, signal
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from anybatch.core.batch import tensors
from anybatch.core.out_of_memory import free_memory, is_out_of_memory, once_more
from anybatch.core.snapshot import of_step
from anybatch.core.torch_private import (
    FakeTensor,
    StorageWeakRef,
    TorchDispatchMode,
    forget_unscaling,
    is_sharded,
    overflows,
    storage_cdata,
)
from anybatch.errors import MemoryLimitError, NonFiniteError, first_line

NUM_COPIED = 2
"""Number of steps of each parameter before which a snapshot is taken: the first makes the state, the second is measured."""
SMALL_BLOCK = 2**20
"""Temporaries smaller than this are reserved as one block."""
Blocks = tuple[tuple[torch.device, int], ...]
"""Device and bytes of each piece of memory."""


class Stepping:
    """Steps of one optimizer that leave it intact if memory runs out.

    A snapshot is taken before the first two steps of every parameter (on an accelerator to the host, on the CPU to disk),
    because they allocate the optimizer's state and need the most memory. If memory runs out in one, the snapshot is restored
    and the step made again, once; after any other error it is restored too. The second step is measured: its temporaries are
    allocated and freed before each later step, and if they do not fit, a snapshot is taken for that step as well.

    An out-of-memory error inside a later step, although its temporaries did fit, is a `MemoryLimitError`: the optimizer's
    state is inconsistent, and the run has to resume from its last checkpoint.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._num_steps: dict[nn.Parameter, int] = {}
        self._temporaries: Blocks = ()
        self._draws = True
        """False once a step drew no random numbers: then their state is not copied."""
        self._is_compiled = type(optimizer).__module__.startswith("torchao.")
        """True if the step is one compiled graph, which no dispatch mode may watch, and its state cannot be copied."""

    def step(self, act: Callable[[], object]) -> int:
        """Call `act`, which steps the optimizer once.

        Returns:
            1 if memory ran out and the step had to be made again, else 0.
        """
        parameters = (parameter for group in self._optimizer.param_groups for parameter in group["params"])
        moving = [parameter for parameter in parameters if parameter.grad is not None]
        count = min((self._num_steps.get(parameter, 0) for parameter in moving), default=NUM_COPIED)
        if self._is_compiled or (count >= NUM_COPIED and self._has_room()):
            self._step_once(act)
            return 0
        meter = _TemporariesMeter.of(self._optimizer, moving) if count == NUM_COPIED - 1 else None
        retries = self._step_undoably(act, moving, meter or nullcontext())
        if meter is not None and not retries:
            self._temporaries = meter.blocks()
        if not retries or count == 0:
            self._num_steps.update({parameter: self._num_steps.get(parameter, 0) + 1 for parameter in moving})
        return retries

    def _has_room(self) -> bool:
        """Allocate the temporaries of a step and free them at once; return False if they do not fit."""
        blocks = self._temporaries
        try:
            once_more(lambda: [torch.empty(nbytes, dtype=torch.uint8, device=device) for device, nbytes in blocks])
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return False
        return True

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

    def _step_undoably(
        self, act: Callable[[], object], moving: list[nn.Parameter], meter: AbstractContextManager[object]
    ) -> int:
        before = once_more(lambda: of_step(self._optimizer, moving, draws=self._draws))
        which = "a" if all(parameter in self._num_steps for parameter in moving) else "the first"
        attempts: tuple[AbstractContextManager[object], ...] = (meter, nullcontext())
        for attempt, around in enumerate(attempts):
            try:
                with around:
                    act()
                self._draws = before.random is not None and not before.random.is_now()
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


class _TemporariesMeter(TorchDispatchMode):
    """Record of the temporaries that are alive at the peak of a step, without the tensors that it changes."""

    def __init__(self, changing: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._changing = {storage_cdata(tensor.untyped_storage()) for tensor in changing}
        self._alive: dict[int, tuple[StorageWeakRef, torch.device, int]] = {}
        self._peak: list[tuple[torch.device, int]] = []

    @classmethod
    def of(cls, optimizer: Optimizer, moving: list[nn.Parameter]) -> "_TemporariesMeter | None":
        """Make a meter; None if tensors are sparse, sharded or fake, because their storage is not their memory."""
        state = [value for held in optimizer.state.values() if isinstance(held, dict) for value in held.values()]
        changing = [one for one in (*moving, *(each.grad for each in moving), *state) if isinstance(one, Tensor)]
        is_plain = all(
            one.layout is torch.strided and not is_sharded(one) and not isinstance(one, FakeTensor) for one in changing
        )
        return cls(changing) if is_plain else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._alive = {key: held for key, held in self._alive.items() if not held[0].expired()}
        for tensor in tensors(result):
            storage = tensor.untyped_storage()
            if storage_cdata(storage) not in self._changing:
                self._alive[storage_cdata(storage)] = StorageWeakRef(storage), tensor.device, storage.nbytes()
        alive = [(device, nbytes) for _, device, nbytes in self._alive.values()]
        self._peak = max(self._peak, alive, key=lambda blocks: sum(nbytes for _, nbytes in blocks))
        return result

    def blocks(self) -> Blocks:
        """Return the blocks to reserve: each large temporary, and the small ones of a device together."""
        small = dict.fromkeys((device for device, _ in self._peak), 0)
        for device, nbytes in self._peak:
            small[device] += nbytes if nbytes < SMALL_BLOCK else 0
        return (*((device, nbytes) for device, nbytes in self._peak if nbytes >= SMALL_BLOCK), *small.items())


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

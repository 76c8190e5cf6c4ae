"""An optimizer's steps, each done whole: undone, or gone on with, where memory runs out in it."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from anybatch.errors import MemoryLimitError, first_line
from anybatch.state import free_memory, is_out_of_memory, of_step, once_more, random_state, tables_of
from anybatch.torch_inside import num_writes
from anybatch.update.resuming import StepNeeds, StepStudy, WritesDone, is_plain

Act = Callable[[], object]
COPIED_BYTES = 64 * 2**20
"""A step that cannot go on where it stopped is copied each time, if what it changes is no more than this."""
UNWATCHED = nullcontext()
FIRST_ONES = 2
"""How many steps of a parameter are copied; the last of them is watched, because the first makes the state."""


class Stepping:
    """The steps of one optimizer.

    The first steps make the state, and need more than those after them; so do those that meet parameters for the first time.
    They are preceded by a copy of what they change: from an accelerator to the host, on the CPU to disk. If memory runs out in
    one, all that and the random state are put back, memory is freed, and it is done once more; any other error in it finds
    all that put back too. Later steps are not copied: what they need beside what they change is allocated, and given back,
    before anything is written; where it cannot be had, they are copied as the first ones are. Where memory runs out in one
    all the same, it goes on where it stopped.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._num_steps: dict[nn.Parameter, int] = {}
        self._draws = True
        """False once a step was seen that drew nothing: the random state need not lie beside those after it."""
        self._needs = StepNeeds(is_resumable=False, by_ops=False, blocks=())
        self._is_compiled = type(optimizer).__module__.startswith("torchao.")
        """Its step is one graph, which torch refuses to compile while a mode watches; its state cannot be copied."""

    def step(self, act: Act) -> int:
        """Do `act`, which steps the optimizer once; 1 where it had to be done again, else 0."""
        moving = self._moving()
        if self._is_compiled:
            return self._plainly(act, moving)
        count = min((self._num_steps.get(parameter, 0) for parameter in moving), default=FIRST_ONES)
        if count >= FIRST_ONES:
            return self._later(act, moving)
        changing = self._changing(moving)
        if count == FIRST_ONES - 1 and all(map(is_plain, changing)):
            study = StepStudy(moving, changing)
            retries = self._carefully(act, moving, study)
            self._needs = study.needs(draws=self._draws) if not retries else self._needs
        else:
            drawn = once_more(lambda: random_state({parameter.device for parameter in moving}))
            retries = self._carefully(act, moving)
            self._draws = not drawn.is_now()
        if not retries or count == 0:
            self._num_steps.update({parameter: self._num_steps.get(parameter, 0) + 1 for parameter in moving})
        return retries

    def _moving(self) -> list[nn.Parameter]:
        parameters = (parameter for group in self._optimizer.param_groups for parameter in group["params"])
        return [parameter for parameter in parameters if parameter.grad is not None]

    def _changing(self, moving: list[nn.Parameter]) -> list[Tensor]:
        state = [value for held in self._optimizer.state.values() if isinstance(held, dict) for value in held.values()]
        return [one for one in (*moving, *(each.grad for each in moving), *state) if isinstance(one, Tensor)]

    def _later(self, act: Act, moving: list[nn.Parameter]) -> int:
        if not self._has_room():
            return self._carefully(act, moving)
        if self._needs.is_resumable:
            return self._resumably(act, moving)
        changing = self._changing(moving)
        is_copied = all(map(is_plain, changing)) and sum(one.nbytes for one in changing) <= COPIED_BYTES
        return self._carefully(act, moving) if is_copied else self._plainly(act, moving)

    def _has_room(self) -> bool:
        """True if what a step needs beside what it changes can be allocated; it is given back at once."""
        blocks = self._needs.blocks
        try:
            once_more(lambda: [torch.empty(nbytes, dtype=torch.uint8, device=device) for device, nbytes in blocks])
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return False
        return True

    def _resumably(self, act: Act, moving: list[nn.Parameter]) -> int:
        progress, tables = WritesDone(self._changing(moving), by_ops=self._needs.by_ops), tables_of(self._optimizer)
        writes = [num_writes(parameter) for parameter in moving]
        for attempt, around in enumerate((progress.watched, progress.resumed)):
            try:
                with around():
                    act()
                return attempt
            except BaseException as error:
                if not is_out_of_memory(error) and not isinstance(error, MemoryLimitError):
                    self._tell_torn(error, moving, writes)
                    raise
                reason = first_line(error)
            tables.put_back()
        raise self._torn(reason)

    def _plainly(self, act: Act, moving: list[nn.Parameter]) -> int:
        writes = [num_writes(parameter) for parameter in moving]
        try:
            act()
            return 0
        except BaseException as error:
            if not is_out_of_memory(error):
                self._tell_torn(error, moving, writes)
                raise
            raise self._torn(first_line(error)) from None

    def _carefully(
        self, act: Act, moving: list[nn.Parameter], around: AbstractContextManager[object] = UNWATCHED
    ) -> int:
        before = once_more(lambda: of_step(self._optimizer, moving, draws=self._draws))
        for attempt in range(2):
            try:
                with around:
                    act()
                return attempt
            except BaseException as error:
                if not is_out_of_memory(error):
                    before.put_back()
                    raise
                reason = first_line(error)
            around = UNWATCHED
            before.put_back()
            free_memory()
        which = "a" if self._needs.blocks else "the first"
        raise MemoryLimitError(
            f"memory ran out twice in {which} step of {type(self._optimizer).__name__} ({reason}). Weights, optimizer, "
            "scheduler and scaler are as they were. Use an optimizer with less state, foreach=False in it, or a smaller model."
        )

    def _tell_torn(self, error: BaseException, moving: list[nn.Parameter], writes: list[int]) -> None:
        if self._needs.by_ops or [num_writes(parameter) for parameter in moving] != writes:
            error.add_note(f"anybatch: raised amid {type(self._optimizer).__name__}.step, {_TORN}")

    def _torn(self, reason: str) -> MemoryLimitError:
        return MemoryLimitError(
            f"memory ran out in a step of {type(self._optimizer).__name__} ({reason}), and {_TORN} Leave the step more room: "
            "foreach=False or fused=True in the optimizer take the least."
        )


_TORN = "some parameters may have been stepped and others not: resume from the last checkpoint."

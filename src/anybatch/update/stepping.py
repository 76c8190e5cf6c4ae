"""An optimizer's first step, which makes its state: where memory runs out in it, it is undone and done again."""

from collections.abc import Callable

from torch import nn
from torch.optim import Optimizer

from anybatch.errors import MemoryLimitError, first_line
from anybatch.state import free_memory, is_out_of_memory, of_step, once_more
from anybatch.torch_inside import num_writes


class Stepping:
    """The steps of one optimizer.

    The first step makes the state, and needs more than those after it; so does one that meets parameters for the first
    time. It is preceded by a copy of parameters and gradients: from an accelerator to the host, on the CPU to disk. If memory
    runs out in it, all that and the random state are put back, memory is freed, and it is done once more; any other error in it
    finds all that put back too. Later steps are not copied: an error that leaves one of them half-done says so.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._stepped: set[nn.Parameter] = set()

    def step(self, act: Callable[[], object]) -> int:
        """Do `act`, which steps the optimizer once; 1 where it had to be done again, else 0."""
        moving = self._moving()
        if all(parameter in self._stepped for parameter in moving):
            return self._plainly(act, moving)
        retries = self._carefully(act, moving)
        self._stepped.update(moving)
        return retries

    def _moving(self) -> list[nn.Parameter]:
        parameters = (parameter for group in self._optimizer.param_groups for parameter in group["params"])
        return [parameter for parameter in parameters if parameter.grad is not None]

    def _plainly(self, act: Callable[[], object], moving: list[nn.Parameter]) -> int:
        writes = [num_writes(parameter) for parameter in moving]
        try:
            act()
        except BaseException as error:
            if not is_out_of_memory(error):
                if [num_writes(parameter) for parameter in moving] != writes:
                    error.add_note(f"anybatch: raised amid {type(self._optimizer).__name__}.step, {_TORN}")
                raise
            raise MemoryLimitError(
                f"memory ran out in a step of {type(self._optimizer).__name__} ({first_line(error)}), and "
                f"{_TORN} Leave the step more room: "
                "foreach=False or fused=True in the optimizer take the least."
            ) from None
        return 0

    def _carefully(self, act: Callable[[], object], moving: list[nn.Parameter]) -> int:
        before = once_more(lambda: of_step(self._optimizer, moving))
        for attempt in range(2):
            try:
                act()
                return attempt
            except BaseException as error:
                if not is_out_of_memory(error):
                    before.put_back()
                    raise
                reason = first_line(error)
            before.put_back()
            free_memory()
        raise MemoryLimitError(
            f"memory ran out twice in the first step of {type(self._optimizer).__name__} ({reason}). Weights, optimizer, "
            "scheduler and scaler are as they were. Use an optimizer with less state, foreach=False in it, or a smaller model."
        )


_TORN = "some parameters may have been stepped and others not: resume from the last checkpoint."

"""An optimizer's first step, which makes its state: where memory runs out in it, it is undone and done again."""

from collections.abc import Callable

from torch import nn
from torch.optim import Optimizer

from anybatch.errors import MemoryLimitError
from anybatch.state import first_line, free_memory, is_out_of_memory, of_step, once_more


class Stepping:
    """The steps of one optimizer.

    The first step makes the state, and needs more than those after it; so does one that meets parameters for the first
    time. It is preceded by a copy of parameters and gradients: from an accelerator to the host, on the CPU to disk. If memory
    runs out in it, all that and the random state are put back, memory is freed, and it is done once more. Later steps are not
    copied; memory that runs out in one of them is an error that says so.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._stepped: set[nn.Parameter] = set()

    def step(self, act: Callable[[], object]) -> int:
        """Do `act`, which steps the optimizer once; 1 where it had to be done again, else 0."""
        moving = [
            parameter
            for group in self._optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        if all(parameter in self._stepped for parameter in moving):
            return self._plainly(act)
        retries = self._carefully(act, moving)
        self._stepped.update(moving)
        return retries

    def _plainly(self, act: Callable[[], object]) -> int:
        try:
            act()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise MemoryLimitError(
                f"memory ran out in a step of {type(self._optimizer).__name__} ({first_line(error)}), and some parameters may "
                "have been stepped and others not: resume from the last checkpoint. Leave the step more room: "
                "foreach=False or fused=True in the optimizer take the least."
            ) from None
        return 0

    def _carefully(self, act: Callable[[], object], moving: list[nn.Parameter]) -> int:
        before = once_more(lambda: of_step(self._optimizer, moving))
        for attempt in range(2):
            try:
                act()
                return attempt
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                reason = first_line(error)
            before.put_back()
            free_memory()
        raise MemoryLimitError(
            f"memory ran out twice in the first step of {type(self._optimizer).__name__} ({reason}). Weights, optimizer, "
            "scheduler and scaler are as they were. Use an optimizer with less state, foreach=False in it, or a smaller model."
        )

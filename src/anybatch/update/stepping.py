"""An optimizer's first step, which makes its state: where memory runs out in it, it is undone and done again."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from anybatch.errors import MemoryLimitError
from anybatch.state import RandomState, Spool, first_line, free_memory, is_out_of_memory, kept, once_more, random_state


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
        before = once_more(lambda: _Before.of(self._optimizer, moving))
        for attempt in range(2):
            try:
                act()
                return attempt
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                reason = first_line(error)
            before.restore(self._optimizer)
            free_memory()
        raise MemoryLimitError(
            f"memory ran out twice in the first step of {type(self._optimizer).__name__} ({reason}). Weights, optimizer, "
            "scheduler and scaler are as they were. Use an optimizer with less state, foreach=False in it, or a smaller model."
        )


@dataclass(frozen=True, slots=True)
class _Before:
    """What a step changes, as it was."""

    tensors: list[tuple[Tensor, Callable[[], Tensor]]]
    """Parameters, gradients and state tensors, each with what gives its copy."""
    state: dict[Any, Any]
    groups: list[dict[str, Any]]
    random: RandomState

    @staticmethod
    def of(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> "_Before":
        moving = list(parameters)
        spool = Spool()
        state = {key: dict(held) if isinstance(held, dict) else held for key, held in optimizer.state.items()}
        values = [value for held in state.values() if isinstance(held, dict) for value in held.values()]
        gradients = [
            p.grad.detach() for p in moving if p.grad is not None and not p.grad.is_sparse
        ]  # nesterov adds to them
        changing = [
            *(p.detach() for p in moving),
            *gradients,
            *(value for value in values if isinstance(value, Tensor)),
        ]
        return _Before(
            tensors=[(tensor, kept(tensor, spool)) for tensor in changing],
            state=state,
            groups=[dict(group) for group in optimizer.param_groups],
            random=random_state({parameter.device for parameter in moving}),
        )

    def restore(self, optimizer: Optimizer) -> None:
        for key in [key for key in optimizer.state if key not in self.state]:
            del optimizer.state[key]
        for key, held in self.state.items():
            optimizer.state[key] = dict(held) if isinstance(held, dict) else held
        free_memory()  # half-made state makes room for what is read back
        with torch.no_grad():
            for tensor, read in self.tensors:
                tensor.copy_(read())
        for group, was in zip(optimizer.param_groups, self.groups, strict=True):
            group.clear()
            group.update(was)
        self.random.restore()

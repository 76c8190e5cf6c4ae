"""Where forward ends and the loss begins, inside an objective."""

from typing import Any, Protocol

from torch import nn
from torch.jit import ScriptModule

from anybatch.core.events import Event, Forward, Loss
from anybatch.core.torch_private import is_compiled_in_place


class Stages(Protocol):
    """Whatever is told of stages, and knows which one is open."""

    stage: str

    def begin(self, kind: type[Event]) -> None: ...
    def end(self, kind: type[Event], **facts: Any) -> None: ...


class ForwardBoundary:
    """Tells forward from loss inside an objective, by hooks on the model that live as long as this block.

    Each call of the model gives one `Forward`; what follows the last one is the loss.
    """

    def __init__(self, stages: Stages, model: nn.Module, micro_batch: int) -> None:
        self._stages = stages
        self._micro_batch = micro_batch
        # hooks on a module compiled in place, by model.compile(), would be traced, and compiled anew for every micro-batch
        is_hooked = not is_compiled_in_place(model) and not isinstance(model, ScriptModule)
        self._hooks = (
            [
                model.register_forward_pre_hook(self._before, prepend=True),
                model.register_forward_hook(self._after),
            ]
            if is_hooked
            else []
        )

    def __enter__(self) -> None:
        self._stages.begin(Forward)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        if kind is None and self._stages.stage == Forward.stage:
            self._end_forward(None)

    def _before(self, module: nn.Module, inputs: Any) -> None:
        if self._stages.stage != Forward.stage:
            self._stages.begin(Forward)

    def _after(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._end_forward(output)

    def _end_forward(self, output: Any) -> None:
        self._stages.end(Forward, micro_batch=self._micro_batch, output=output)
        self._stages.begin(Loss)

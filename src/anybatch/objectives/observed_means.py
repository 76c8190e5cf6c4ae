"""What a loss really averaged over, seen rather than assumed."""

import inspect
from types import SimpleNamespace
from typing import Any

from torch.overrides import TorchFunctionMode

from anybatch.objectives.criteria import FUNCTIONAL_RULES
from anybatch.objectives.metrics import Number

_SIGNATURES = {function: inspect.signature(function) for function in FUNCTIONAL_RULES}


class ObservedMeans(TorchFunctionMode):
    """Inside this block, `units` collects what every mean-reducing loss function of torch divided by."""

    def __init__(self) -> None:
        super().__init__()
        self.units: list[Number] = []
        self.means: list[Any] = []
        self.nodes: list[Any] = []
        """Where each mean is in the graph."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = FUNCTIONAL_RULES.get(func)
        if rule is not None:
            call = _SIGNATURES[func].bind(*args, **(kwargs or {}))
            call.apply_defaults()
            options = SimpleNamespace(**call.arguments)
            if options.reduction == "mean":
                self.units.append(rule(options.target, options))
                mean = func(*args, **(kwargs or {}))
                self.means.append(mean.detach().clone())  # a model may add to its loss in place
                self.nodes.append(mean.grad_fn)
                return mean
        return func(*args, **(kwargs or {}))

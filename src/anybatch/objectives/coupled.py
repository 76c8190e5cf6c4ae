"""`Coupled`: an objective whose rows look at each other, cut at its representations."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn

from anybatch.batches import Batch, rows
from anybatch.errors import LossError
from anybatch.faces import called, name_of, short
from anybatch.objectives.metrics import Metrics
from anybatch.objectives.objective import Objective, Units

Encode = Callable[[nn.Module, Batch], Batch]
CoupledLoss = Callable[[Any], "Tensor | tuple[Tensor, Metrics]"]


@dataclass(frozen=True, slots=True)
class Coupled:
    """An objective whose loss sees all rows at once, through representations that fit where the graph does not.

    `encode(model, micro_batch)` returns representations: a tensor or any nesting of them, rows first. Tensors without a
    gradient (labels) go along; a 0-dim tensor (a logit scale) must be the same for every micro-batch. `loss(representations)`
    returns one number for all rows, or `(number, metrics)`; parameters of its own, such as a learned temperature, get
    their gradient from it. `units(batch)` is reported; it weighs nothing.

    Exact for any loss, with dropout too: the second forward draws what the first drew. Buffers advance once.

    >>> import torch
    >>> objective = Coupled(lambda model, pair: (model(pair[0]), model(pair[1])), lambda pair: (pair[0] @ pair[1].T).var())
    >>> from anybatch import Accumulator
    >>> Accumulator(nn.Linear(3, 2), objective, micro_batch=4).backward((torch.randn(10, 3), torch.randn(10, 3))).micro_batches
    3
    """

    encode: Encode
    loss: CoupledLoss
    units: Units = rows
    reduction: Literal["mean"] = field(default="mean", init=False)
    units_for: None = field(default=None, init=False)
    reduction_for: None = field(default=None, init=False)
    terms: Mapping[str, Units | None] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if not callable(self.encode) or not callable(self.loss):
            raise LossError(
                f"Coupled(encode={self.encode!r}, loss={self.loss!r}): both must be functions, encode(model, micro_batch) and "
                "loss(representations), for example Coupled(lambda model, pair: (model(pair[0]), model(pair[1])), info_nce())."
            )

    def __repr__(self) -> str:
        return called("Coupled", name_of(self.encode), short(self.loss))

    def parameters(self) -> list[nn.Parameter]:
        """The loss's own parameters, for the optimizer: those of an `nn.Module`, else none."""
        return list(self.loss.parameters()) if isinstance(self.loss, nn.Module) else []

    def whole(self) -> Objective:
        """The same loss as an objective of (model, batch), for a batch that is not cut."""
        return Objective(lambda model, batch: self.loss(self.encode(model, batch)), self.units)

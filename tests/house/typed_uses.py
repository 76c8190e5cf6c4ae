"""What a type checker sees of `import anybatch`: checked with the tree; an `ignore` that is not needed is an error there."""

from typing import assert_type

from torch import nn
from torch.optim import Optimizer

import anybatch


def use(model: nn.Module, optimizer: Optimizer, objective: anybatch.Objective) -> None:
    """Right uses pass, and each wrong one is told by name."""
    update = anybatch.Update(model, optimizer, objective, micro_batch=16)
    assert_type(update(None).applied, bool)
    anybatch.Update(model, optimizer, objective)  # type: ignore[call-arg]
    anybatch.Update(model, optimizer, objective, micro_batch=16, clip_nrom=1.0)  # type: ignore[call-arg]
    anybatch.NoSuchThing  # type: ignore[attr-defined]  # noqa: B018

"""Small setups that tests of several packages share; the reference they compare with is in tests/reference.py."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    """The mean over the targets of an (inputs, targets) batch."""
    return F.cross_entropy(model(batch[0]), batch[1])


def labelled(count: int = 12, width: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Rows in float64, of three classes."""
    torch.manual_seed(seed)
    return torch.randn(count, width).double(), torch.randint(0, 3, (count,))


def seeded(seed: int) -> Any:
    """A fixture of a module: each of its tests starts from this seed."""

    @pytest.fixture(autouse=True)
    def start() -> None:
        torch.manual_seed(seed)

    return start

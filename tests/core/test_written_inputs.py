"""A forward that writes into its input is an error wherever the rows are used again, and left alone where they are not."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch import Accumulator, BatchError, Coupled, info_nce, supervised
from tests.injection import OutOfMemoryAt
from tests.reference import gradient, relative_error


class Doubling(nn.Module):
    """Its forward doubles the rows that it is given, in place or not."""

    def __init__(self, *, is_in_place: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(6, 4).double()
        self.is_in_place = is_in_place

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.mul_(2) if self.is_in_place else x * 2)


def rows(count: int = 12) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"one": torch.randn(count, 6).double(), "other": torch.randn(count, 6).double()}


def encode(model: nn.Module, batch: Any) -> Any:
    return model(batch["one"]), model(batch["other"])


COUPLED = Coupled(encode, info_nce(0.1))


def test_a_coupled_loss_refuses_a_forward_that_writes_into_its_rows_by_their_name():
    model = Doubling(is_in_place=True)
    with pytest.raises(BatchError, match=r"batch\['one'\] of shape \(4, 6\) was changed in place.*every forward twice"):
        Accumulator(model, COUPLED, micro_batch=4).backward(rows())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_without_writing_it_is_the_whole_batchs_and_written_twice_it_was_not():
    reference = Doubling(is_in_place=False)
    COUPLED.loss(encode(reference, rows())).backward()
    wanted = gradient(reference.parameters())
    model = Doubling(is_in_place=False)
    Accumulator(model, COUPLED, micro_batch=4).backward(rows())
    assert relative_error(model, wanted) <= 1e-12
    twice = Doubling(is_in_place=False)
    leaves = [part.detach().requires_grad_() for part in encode(twice, rows())]
    COUPLED.loss(leaves).backward()
    again = encode(twice, {name: column * 2 for name, column in rows().items()})  # what the second forward would find
    torch.autograd.backward(again, [leaf.grad for leaf in leaves])
    assert relative_error(twice, wanted) > 0.3


def test_a_batch_that_was_written_into_does_not_start_again_after_memory_ran_out():
    model = Doubling(is_in_place=True)
    batch = (rows()["one"], torch.randint(0, 4, (12,)))
    accumulator = Accumulator(model, supervised(nn.CrossEntropyLoss()), micro_batch=6)
    with OutOfMemoryAt(20), pytest.raises(BatchError, match=r"batch\[0\] of shape \(12, 6\).*memory ran out"):
        accumulator.backward(batch)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_where_every_row_runs_once_it_is_the_whole_batchs():
    targets = torch.arange(12) % 4
    reference = Doubling(is_in_place=True)
    F.cross_entropy(reference(rows()["one"]), targets).backward()
    model = Doubling(is_in_place=True)
    Accumulator(model, supervised(nn.CrossEntropyLoss()), micro_batch=5).backward((rows()["one"], targets))
    assert relative_error(model, gradient(reference.parameters())) <= 1e-12

"""What a graph saves and is put on disk: a storage that died is forgotten, and no other one is taken for it."""

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from anybatch import Accumulator, Objective

# internals: the table of what was put away is nowhere to be seen from outside
from anybatch.batch_norm.offload import SavedTensors
from anybatch.core.snapshot import TensorFile


def keeper() -> SavedTensors:
    return SavedTensors("disk", [], torch.device("cpu"), TensorFile())


def num_kept(keeper: SavedTensors) -> int:
    return len(keeper._kept)


LARGE = 8192
"""Numbers of a tensor that is worth putting away: 32 KiB."""


class Passing(nn.Module):
    """Multiplies by tensors that live only as long as one product: the next one finds their memory free, and takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(LARGE))
        self.norm = nn.BatchNorm1d(1)
        self.addresses: set[int] = set()
        self.num_tensors = 0

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(len(x))
        for number in range(1, 9):
            passing = torch.full((LARGE,), float(number)) * (1 + x.detach().mean())
            self.addresses.add(passing.untyped_storage()._cdata)
            self.num_tensors += 1
            total = total + (self.weight * passing).mean() * x[:, 0]
            del passing
        return self.norm(total[:, None])


def gradient_of(offload: str | None) -> tuple[Passing, Tensor]:
    torch.manual_seed(0)
    model = Passing()
    x, y = torch.randn(7, 1), torch.randn(7, 1)
    objective = Objective(lambda model, batch: (model(batch[0]) - batch[1]).square().mean())
    Accumulator(model, objective, micro_batch=2, batch_norm="exact", offload=offload).backward((x, y))
    return model, model.weight.grad


def test_a_storage_at_the_address_of_one_that_died_is_not_taken_for_it():
    for _ in range(3):
        model, offloaded = gradient_of("disk")
        assert len(model.addresses) < model.num_tensors, "addresses were used again"
        _, in_place = gradient_of(None)
        assert torch.equal(offloaded, in_place)


def test_an_address_alone_does_not_tell_two_storages_apart():
    """The mistake: the second tensor has the address, the size and the version of the first."""
    seen: dict[int, float] = {}
    taken_for_another = 0
    for number in range(50):
        tensor = torch.full((LARGE,), float(number))
        taken_for_another += seen.setdefault(tensor.untyped_storage()._cdata, float(number)) != number
        del tensor
    assert taken_for_another > 0


def saved(keeper: SavedTensors, make: Callable[[int], Tensor], passes: int) -> tuple[Tensor, Tensor, list[int]]:
    """A weight times many tensors, each saved through the keeper; the product, the weight, and the table's size after each."""
    weight = torch.ones(LARGE, requires_grad=True)
    total, sizes = torch.zeros(()), []
    with keeper.hooks():
        for number in range(passes):
            total = total + (weight * make(number)).sum()
            sizes.append(num_kept(keeper))
    return total, weight, sizes


def test_the_table_does_not_grow_with_tensors_that_die():
    with keeper() as kept:
        total, weight, sizes = saved(kept, lambda number: torch.full((LARGE,), float(number)), 40)
        assert 0 < max(sizes) <= 4, sizes
        total.backward()
    assert torch.equal(weight.grad, torch.full((LARGE,), float(sum(range(40)))))


def test_a_tensor_that_lives_is_kept_in_the_table_and_written_once():
    alive = [torch.full((LARGE,), float(number)) for number in range(5)]
    with keeper() as kept:
        total, weight, sizes = saved(kept, lambda number: alive[number % 5], 40)
        assert kept._file.num_bytes == 5 * 4 * LARGE
        assert sizes[-1] == 5
        total.backward()
    assert torch.equal(weight.grad, torch.full((LARGE,), 8.0 * sum(range(5))))


def test_after_the_batch_the_table_is_empty():
    alive = torch.ones(LARGE)
    with keeper() as kept:
        saved(kept, lambda number: alive, 3)[0].backward()
        assert num_kept(kept) == 1
    assert num_kept(kept) == 0


@pytest.mark.parametrize("versions", [1, 5])
def test_a_tensor_that_is_written_to_between_is_another_one_each_time(versions):
    """A hook sees the numbers as they were when they were saved: torch itself would refuse."""
    changing = torch.zeros(LARGE)
    with keeper() as kept:
        total, weight, _ = saved(kept, lambda number: changing if number % 3 else changing.add_(1), 3 * versions)
        assert kept._file.num_bytes == versions * 4 * LARGE
        total.backward()
    assert torch.equal(weight.grad, torch.full((LARGE,), 3.0 * sum(range(1, versions + 1))))
    gc.collect()

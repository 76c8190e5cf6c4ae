"""Saved tensors kept elsewhere: the same gradient, less memory alive, nothing left behind, no storage taken for another."""

import copy
import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from anybatch import Accumulator, Objective, UpdateError, supervised
from anybatch.batch_norm import offload
from anybatch.batch_norm.offload import SavedTensors
from anybatch.core.snapshot import TensorFile
from benchmarks.meter import LiveBytes, peak_bytes_of_all_threads
from benchmarks.models import ResidualNet
from tests.reference import gradient

CPU = torch.device("cpu")


def run(where: str | None, rows: int = 16, model: nn.Module | None = None) -> Tensor:
    torch.manual_seed(0)
    model = model or ResidualNet(width=4)
    batch = torch.randn(rows, 3, 16, 16), torch.randint(0, 10, (rows,))
    Accumulator(
        model, supervised(nn.CrossEntropyLoss()), micro_batch=rows // 4, batch_norm="exact", offload=where
    ).backward(batch)
    return gradient(model.parameters())


def open_files() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").exists() else 0


@pytest.mark.parametrize("where", ["disk", "auto"])
def test_the_gradient_is_the_same_to_the_bit_and_no_file_is_left(where, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = open_files()
    assert torch.equal(run(where), run(None))
    assert open_files() == before
    assert os.listdir(tmp_path) == []


def test_auto_leaves_tensors_in_place_until_half_of_the_free_memory_is_taken_and_then_writes(monkeypatch):
    written = []
    write = TensorFile.write
    monkeypatch.setattr(TensorFile, "write", lambda self, flat: written.append(flat.nbytes) or write(self, flat))
    run("auto")
    assert not written, "this fits"
    monkeypatch.setattr(offload, "free_on_host", lambda: 400_000)
    assert torch.equal(run("auto"), run(None))
    some = sum(written)
    written.clear()
    run("disk")
    assert sum(written) - 200_000 <= some < sum(written)


def test_fewer_bytes_are_alive_with_offload_and_the_meter_sees_every_thread():
    torch.manual_seed(0)
    model = ResidualNet(width=8)
    batch = torch.randn(32, 3, 32, 32), torch.randint(0, 10, (32,))
    held = [*model.parameters(), *model.buffers(), *batch]

    def peak(micro_batch: int, **options: str | None) -> int:
        model.zero_grad()
        accumulator = Accumulator(model, supervised(nn.CrossEntropyLoss()), micro_batch=micro_batch, **options)
        return peak_bytes_of_all_threads(lambda: accumulator.backward(batch), held)

    whole = peak(32, batch_norm="exact")
    assert peak(8, batch_norm="exact", offload=None) > 0.9 * whole, "all graphs live together"
    assert peak(8, batch_norm="exact", offload="disk") < 0.3 * whole


def test_the_meter_counts_what_lives_once_and_forgets_what_died():
    with LiveBytes([]) as meter:
        first = torch.zeros(1000)
        view = first[10:]
        assert meter.live == 4000
        del first
        assert meter.live == 4000, "the view holds it"
        del view
        second = torch.zeros(500)
        assert (meter.live, meter.peak) == (2000, 4000)
        del second


def test_a_tensor_saved_by_several_operations_is_kept_once_and_one_that_changed_is_another():
    x = torch.randn(100, 100, requires_grad=True)
    with SavedTensors("disk", [x], CPU, TensorFile()) as keeper:
        with keeper.hooks():
            y = x * 2
            z = y * y.tanh() + y.sin() + y.T.cos().T
            w = z.detach().clone()
            a = z * w
            before = w.clone()
            w.add_(1)
            b = z * w
        # y, tanh y, w, w + 1; what sin and cos save is y again, or a view of it
        assert keeper._file.num_bytes == 4 * x.nbytes
        (a + b).sum().backward()
    plain = x.detach().clone().requires_grad_()
    y = plain * 2
    ((y * y.tanh() + y.sin() + y.cos()) * (before + before + 1)).sum().backward()
    assert torch.allclose(x.grad, plain.grad, atol=1e-4)


def test_a_tensor_that_stays_and_is_changed_before_backward_is_refused_as_torch_does():
    x, small = torch.randn(3, requires_grad=True), torch.randn(3)
    with SavedTensors("disk", [], CPU, TensorFile()) as keeper:
        with keeper.hooks():
            y = x * small
        small.add_(1)
        with pytest.raises(RuntimeError, match=r"shape \(3,\).*modified by an inplace operation: it is at version 1"):
            y.sum().backward()


def test_parameters_the_batch_small_tensors_and_slices_of_large_ones_stay():
    weight, x, small, large = (
        nn.Parameter(torch.randn(80, 80)),
        torch.randn(80, 80),
        torch.randn(8),
        torch.randn(400, 80),
    )
    with SavedTensors("disk", [weight, x], CPU, TensorFile()) as keeper:
        with keeper.hooks():
            loss = (weight * x).sum() + (weight.sum() * small).sum() + (weight * large[:80]).sum()
        assert keeper._file.num_bytes == 0
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
def test_any_dtype_and_stride_comes_back_as_it_was(dtype):
    x = torch.randn(60, 50, 7).to(dtype).permute(2, 0, 1)
    with SavedTensors("disk", [], CPU, TensorFile()) as keeper:
        packed = keeper._pack(x)
        assert keeper._file.num_bytes == x.nbytes
        back = packed()
        assert torch.equal(back, x)
        assert (back.stride(), back.dtype) == (x.stride(), x.dtype)
        assert packed().data_ptr() == back.data_ptr(), "read once while somebody holds it"


def test_an_error_in_forward_or_backward_closes_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = open_files()
    for method in ("forward", "backward"):
        model = ResidualNet(width=4)

        def fail(*_: object) -> None:
            raise RuntimeError("a bad row")

        if method == "forward":
            model.head.register_forward_hook(fail)
        else:
            fail.__module__ = "anybatch.meters"  # the user's own hooks are refused
            model.stem[0].weight.register_hook(fail)
        with pytest.raises(RuntimeError, match="a bad row"):
            run("disk", model=model)
        del model
        assert open_files() == before
        assert os.listdir(tmp_path) == []


def test_one_file_serves_all_batches_and_a_copy_has_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = open_files()
    model = ResidualNet(width=4)
    options = {"micro_batch": 4, "batch_norm": "exact", "offload": "disk"}
    accumulator = Accumulator(model, supervised(nn.CrossEntropyLoss()), **options)
    for rows in (16, 8, 16):
        accumulator.backward((torch.randn(rows, 3, 16, 16), torch.randint(0, 10, (rows,))))
        assert open_files() == before + 1
    twin = copy.deepcopy(accumulator)
    assert open_files() == before + 1
    del accumulator, twin
    assert open_files() == before


def test_the_host_is_no_other_place_than_the_cpu():
    with pytest.raises(UpdateError, match=r"offload='host'.*the model is on the CPU.*Use offload='disk'"):
        run("host")


def test_a_batch_that_failed_is_freed_though_its_graph_went_through_hooks():
    class Failing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("here")

    alive = []
    model = nn.Sequential(nn.Linear(3, 4096), nn.BatchNorm1d(4096), nn.Tanh(), Failing())
    model[2].register_forward_hook(
        lambda module, inputs, output: alive.append(StorageWeakRef(output.untyped_storage()))
    )
    accumulator = Accumulator(model, Objective(lambda model, x: model(x).mean()), micro_batch=2, batch_norm="exact")
    with pytest.raises(ValueError, match="here"):
        accumulator.backward(torch.randn(4, 3))
    gc.collect()
    assert alive
    assert all(storage.expired() for storage in alive)


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

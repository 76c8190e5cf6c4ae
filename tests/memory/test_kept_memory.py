"""What batches leave in the process beside tensors: kernels of the CPU keep something for each shape that they meet."""

import copy
import ctypes
import gc
import threading
import warnings
import weakref
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from anybatch import Fit, Rows, Update, supervised
from anybatch.batches import Workload
from anybatch.memory.tracing import KeptMemory
from anybatch.memory.tracing import kept_memory as kept_module
from anybatch.passes import Running

MB = 10**6


@pytest.fixture
def kept() -> KeptMemory:
    return KeptMemory()


def test_what_stays_counts_and_tensors_that_are_known_do_not(kept):
    known: list[Tensor] = []
    kept.begin(lambda: known, [])
    known.append(torch.empty(MB))  # 4 MB
    held = bytearray(3 * MB)
    kept.look()
    assert kept.bytes == pytest.approx(len(held), rel=0.02)
    assert kept.next_time == 2 * kept.bytes, "the next batch may leave as much again"


def test_the_batch_and_what_it_was_copied_into_do_not_count(kept):
    batch = torch.empty(MB)
    kept.begin(list, [batch])
    copied = [batch[:500].clone(), torch.empty(MB)]
    kept.look(copied)
    assert kept.bytes < 0.1 * MB
    kept.begin(list, [])
    kept.look()  # not handed over: it would be taken for something kept
    more = torch.empty(MB)
    kept.look()
    assert kept.bytes >= more.nbytes


def test_what_others_allocate_between_batches_is_theirs(kept):
    kept.begin(list, [])
    kept.look()
    kept.end()
    theirs = bytearray(5 * MB)
    kept.look()
    kept.begin(list, [])
    kept.look()
    assert kept.bytes < 0.1 * len(theirs)


def test_what_the_last_batch_left_and_is_gone_by_the_next_one_no_longer_counts(kept):
    for _ in range(5):
        kept.begin(list, [])
        held = bytearray(3 * MB)
        kept.look()
        kept.end()
        assert kept.bytes == pytest.approx(3 * MB, rel=0.02)
        del held


def test_little_does_not_count_until_it_is_more(kept):
    held = []
    for number in range(1, 5):
        kept.begin(list, [])
        held.append(bytearray(400_000))
        kept.look()
        assert (kept.bytes > 0) is (number >= 3)
    assert kept.bytes == pytest.approx(1_600_000, rel=0.02)


def test_where_the_c_library_does_not_tell_nothing_counts(kept, monkeypatch):
    monkeypatch.setattr(kept_module, "allocated_on_host", lambda: None)
    kept.begin(list, [])
    held = bytearray(3 * MB)
    kept.look()
    assert kept.bytes == 0 < len(held)


class Keeping(nn.Module):
    """Keeps something for each number of rows, as kernels do, and looks at its numbers, so that real steps are tried."""

    def __init__(self, each: int) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(16, 2048), nn.Tanh(), nn.Linear(2048, 4))
        self.each = each

    def forward(self, x: Tensor) -> Tensor:
        kept_for(len(x), self.each)
        return self.inside(x * float(x.abs().max() > 0))


@cache
def kept_for(rows: int, each: int) -> int:
    """As much memory, for good, as kernels would keep for a shape: where nobody who puts Python's state back can reach it."""
    allocate = ctypes.CDLL(None).malloc
    allocate.argtypes, allocate.restype = [ctypes.c_size_t], ctypes.c_size_t
    return allocate(each)


EACH = 2_000_000
ROWS = (9000, 14000, 11000, 12500, 13100, 13700, 10130)


def sizes_of(fit: Fit, each: int) -> list[int]:
    kept_for.cache_clear()
    torch.manual_seed(0)
    model = Keeping(each)
    update = Update(
        model, torch.optim.SGD(model.parameters()), supervised(nn.CrossEntropyLoss()), micro_batch=fit, check="off"
    )
    sizes = []
    for rows in ROWS:
        update((torch.randn(rows, 16), torch.randint(0, 4, (rows,))))
        assert fit.choice is not None
        sizes.append(fit.choice.size)
    return sizes


def test_micro_batches_become_smaller_by_what_is_kept_and_it_is_said_once():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = sizes_of(Fit("100MiB"), 0)
    assert min(plain) > 0.95 * plain[0], "where nothing is kept they stay as they are"
    fit = Fit("100MiB")
    with pytest.warns(UserWarning, match="ONEDNN_PRIMITIVE_CACHE_CAPACITY") as said:
        sizes = sizes_of(fit, EACH)
    assert len([one for one in said if "kernels of the CPU keep" in str(one.message)]) == 1
    plan = fit.choice.plan
    kept = EACH * (kept_for.cache_info().currsize - 1)  # the first shape came with what is loaded once
    assert plan.peak(sizes[-1]) + kept <= plan.memory < plan.peak(plain[-1]) + kept


def test_a_split_that_is_copied_while_a_batch_is_at_hand_copies_no_model():
    fit, model = Fit("20MiB"), nn.Linear(16, 4)
    batch = torch.randn(64, 16), torch.randint(0, 4, (64,))
    objective = supervised(nn.CrossEntropyLoss())
    fit.choose_for(Workload(model=model, objective=objective, running=Running()), batch)
    model.lock = threading.Lock()
    with pytest.raises(TypeError, match="lock"):
        copy.deepcopy(model)
    assert len(copy.deepcopy(fit).cut(batch)) == 1  # as a look at the first batch does


def test_a_split_holds_no_model_when_its_batch_has_run():
    fit, model = Fit("20MiB"), nn.Linear(16, 4)
    update = Update(
        model, torch.optim.SGD(model.parameters()), supervised(nn.CrossEntropyLoss()), micro_batch=fit, check="off"
    )
    update((torch.randn(64, 16), torch.randint(0, 4, (64,))))
    alive = weakref.ref(model)
    del model, update
    gc.collect()
    assert alive() is None


def test_all_micro_batches_but_the_last_are_full_and_the_last_is_no_single_row():
    fit, sizes = Fit("2MiB"), []
    model = nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 4))
    model[0].register_forward_hook(lambda layer, inputs, output: sizes.append(len(output)))
    update = Update(
        model, torch.optim.SGD(model.parameters()), supervised(nn.CrossEntropyLoss()), micro_batch=fit, check="off"
    )
    update((torch.randn(3000, 16), torch.randint(0, 4, (3000,))))
    full, sizes[:] = fit.choice.size, []
    update((torch.randn(2 * full + 1, 16), torch.randint(0, 4, (2 * full + 1,))))
    assert sizes == [full, full - 1, 2]
    assert [len(part) for part in Rows(full).cut(torch.empty(2 * full + 1, 1))] != sizes, "as equal as can be"

"""What an update sends is counted."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from anybatch import Accumulator, Update, supervised
from tests.parallel.wrapped import (
    Wrap,
    convolutional,
    ddp,
    fsdp,
    fsdp_units,
    labelled,
    near_equal,
    network,
    own,
    signals,
)
from tests.processes.ranks import on_ranks


def collectives(wrap: Wrap, micro_batch: int, reshard: bool = True) -> dict[str, int]:
    """What the third update sends, by name; the first two set up buckets."""
    model = wrap(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    update = Update(
        model, optimizer, supervised(nn.CrossEntropyLoss()), micro_batch=micro_batch, clip_norm=1.0, reshard=reshard
    )
    rows = own(labelled(24), near_equal(24))
    update(rows)
    update(rows)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        update(rows)
    return dict(Counter(event.name for event in profile.events() if event.name.startswith("gloo:")))


@pytest.mark.parametrize("micro_batch", [12, 4, 1])
def test_ddp_reduces_once_per_update_whatever_the_number_of_micro_batches(micro_batch):
    # one bucket; three gathers of a few numbers: before the first forward, before the last pass, for the result
    for rank in on_ranks(2, collectives, ddp, micro_batch):
        assert rank == {"gloo:all_reduce": 1, "gloo:all_gather": 3}


def synchronising_every_micro_batch() -> dict[str, int]:
    """The twin of counting: without no_sync there is one reduction per micro-batch."""
    model = DistributedDataParallel(network())
    rows = own(labelled(24), near_equal(24))
    F.cross_entropy(model(rows[0]), rows[1]).backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for start in range(0, len(rows[0]), 2):
            F.cross_entropy(model(rows[0][start : start + 2]), rows[1][start : start + 2]).backward()
    return dict(Counter(event.name for event in profile.events() if event.name.startswith("gloo:")))


def test_without_no_sync_it_is_once_per_micro_batch():
    for rank in on_ranks(2, synchronising_every_micro_batch):
        assert rank["gloo:all_reduce"] == 6


@pytest.mark.parametrize("micro_batch", [12, 4, 1])
def test_fsdp_scatters_gradients_once_per_update(micro_batch):
    # two sharded layers, whose reduce-scatter is an all-reduce on gloo, and the norm
    for rank in on_ranks(2, collectives, fsdp, micro_batch):
        assert rank["gloo:all_reduce"] == 3


def test_fsdp_gathers_parameters_anew_in_each_pass_unless_they_are_kept():
    anew, kept = on_ranks(2, collectives, fsdp, 1), on_ranks(2, collectives, fsdp, 1, reshard=False)
    for again, once in zip(anew, kept, strict=True):
        assert once["gloo:all_gather"] < 0.6 * again["gloo:all_gather"]


def exact_norm_collectives(micro_batch: int) -> dict[str, int]:
    """What a batch in lockstep sends, by name."""
    accumulator = Accumulator(
        fsdp_units(convolutional()), supervised(nn.CrossEntropyLoss()), micro_batch=micro_batch, batch_norm="exact"
    )
    rows = own(signals(14), near_equal(14))
    accumulator.backward(rows)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        accumulator.backward(rows)
    return dict(Counter(event.name for event in profile.events() if event.name.startswith("gloo:")))


def test_in_lockstep_fsdp_sends_the_same_however_many_micro_batches():
    # a reduce-scatter, an all-reduce on gloo, for each of four units with parameters
    whole, cut = on_ranks(2, exact_norm_collectives, 7), on_ranks(2, exact_norm_collectives, 1)
    for one, seven in zip(whole, cut, strict=True):
        assert one == seven
        assert one["gloo:all_reduce"] == 4

"""On several ranks: hooks of torch's own wrappers are let through and the user's refused; what steps in forward steps once."""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch import Accumulator, supervised
from tests.parallel.wrapped import BOTH, Wrap, ddp, error, labelled, largest, near_equal, network, own
from tests.processes.ranks import on_ranks, raised_on_ranks
from tests.reference import gradient, whole_batch_gradient


def unhooked(wrap: Wrap) -> dict[str, float]:
    model, batch = network(), labelled(18)
    reference = whole_batch_gradient(model, lambda twin, rows: F.cross_entropy(twin(rows[0]), rows[1]), batch)
    wrapped = wrap(model)
    for _ in range(2):
        wrapped.zero_grad()
        Accumulator(wrapped, supervised(nn.CrossEntropyLoss()), micro_batch=3).backward(own(batch, near_equal(18)))
    return {"error": error(wrapped, reference)}


@BOTH
def test_hooks_of_ddp_and_fsdp_are_not_refused(wrap):
    assert largest(on_ranks(2, unhooked, wrap), "error") <= 1e-6


def hooked() -> None:
    model = network()
    next(model.parameters()).register_hook(lambda grad: grad.clamp(-0.1, 0.1))
    Accumulator(ddp(model), supervised(nn.CrossEntropyLoss()), micro_batch=3).backward(
        own(labelled(18), near_equal(18))
    )


def test_the_users_are_on_every_rank():
    for rank in raised_on_ranks(2, hooked):
        assert "UpdateError" in rank
        assert "has a hook (register_hook: " in rank


def stepping_model() -> nn.Module:
    torch.manual_seed(0)
    parts = nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten(), nn.Linear(6, 3)
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)), *parts).double()


def steps_in_forward() -> dict[str, float]:
    torch.manual_seed(1)
    batch: tuple[Tensor, Tensor] = (torch.randn(11, 6).double(), torch.randint(0, 3, (11,)))
    model = stepping_model()
    wanted = copy.deepcopy(model)
    F.cross_entropy(wanted(batch[0]), batch[1]).backward()
    wrapped = ddp(model)
    Accumulator(wrapped, supervised(nn.CrossEntropyLoss()), micro_batch=2).backward(own(batch, near_equal(11)))
    pairs = zip(model.buffers(), wanted.buffers(), strict=True)
    return {
        "error": error(wrapped, gradient(wanted.parameters())),
        "buffers": max(float((mine.double() - its.double()).abs().max()) for mine, its in pairs),
    }


def test_spectral_norm_and_instance_norm_advance_once_over_all_ranks():
    told = on_ranks(2, steps_in_forward)
    assert largest(told, "error") <= 1e-12
    assert largest(told, "buffers") <= 1e-12


def buffered() -> dict[str, float]:
    """Rank 0 runs two passes and rank 1 one; from the second batch on DDP sums in the last pass itself."""
    model, batch = network(), labelled(12)
    model.register_buffer("sent_by_ddp", torch.zeros(1))
    reference = whole_batch_gradient(model, lambda twin, rows: F.cross_entropy(twin(rows[0]), rows[1]), batch)
    accumulator = Accumulator(ddp(model), supervised(nn.CrossEntropyLoss()), micro_batch=5)
    for _ in range(3):
        accumulator.model.zero_grad()
        accumulator.backward(own(batch, (10, 2)))
    return {"error": error(accumulator.model, reference)}


def test_buffers_are_sent_before_any_pass_so_that_no_rank_waits_elsewhere():
    assert largest(on_ranks(2, buffered), "error") <= 1e-6

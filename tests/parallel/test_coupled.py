"""A coupled loss over all ranks' rows."""

import copy

import torch
import torch.distributed as dist
from torch import nn

from anybatch import Accumulator, Coupled, info_nce
from tests.parallel.wrapped import (
    ScaledInfoNCE,
    Towers,
    Wrap,
    cases,
    ddp,
    fsdp,
    fsdp_units,
    largest,
    near_equal,
    own,
    pairs,
    whole,
)
from tests.processes.ranks import on_ranks


def coupled(wrap: Wrap, counts: str = "uneven") -> dict[str, float]:
    """A contrastive loss over all ranks' rows; the scale is the model's, the bias the loss's own."""
    torch.manual_seed(1)
    model, own_loss, batch = Towers().double(), ScaledInfoNCE(), pairs(23)
    twin, twin_loss = copy.deepcopy(model), copy.deepcopy(own_loss)
    wanted, metrics = twin_loss(twin(batch))
    wanted.backward()
    reference = torch.cat([whole(twin), whole(twin_loss)])
    given = near_equal(23) if counts == "uneven" else [23, *[0] * (dist.get_world_size() - 1)]
    rows = own(batch, given)
    wrapped = wrap(model)
    accumulator = Accumulator(
        wrapped,
        Coupled(lambda model, pair: model(pair), own_loss),
        micro_batch=2 + dist.get_rank(),
    )
    result = accumulator.backward(rows if len(rows[0]) else None)
    got = torch.cat([whole(wrapped), whole(own_loss)])
    # the common mistake: each rank's loss over its own rows, averaged
    alone = range(0, 23, 12)
    mistaken = copy.deepcopy(twin)
    mistaken.zero_grad()
    sum(twin_loss(mistaken((batch[0][i : i + 12], batch[1][i : i + 12])))[0] for i in alone).div(len(alone)).backward()
    return {
        "error": float((got - reference).norm() / reference.norm()),
        "own_rows_only": float((whole(mistaken) - whole(twin)).norm() / whole(twin).norm()),
        "loss": abs(float(result.loss) - float(wanted.detach())),
        "units": result.units - 23,
        "rows": float((result.metrics["rows"] - metrics["rows"].values.detach()).abs().max()),
        "seen": float(result.metrics["seen"]) - 23,
    }


@cases(
    (2, coupled, ddp),
    (2, coupled, ddp, "none"),
    (2, coupled, fsdp),
    (2, coupled, fsdp, "none"),
    (3, coupled, ddp),
)
def test_a_coupled_loss_sees_all_ranks_rows_and_its_own_parameters_count_once(size, scenario, arguments):
    told = on_ranks(size, scenario, *arguments)
    for key in ("error", "loss", "rows"):
        assert largest(told, key) < 1e-12
    for key in ("units", "seen"):
        assert largest(told, key) == 0


def test_a_loss_that_sees_its_own_ranks_rows_alone_is_another():
    assert min(rank["own_rows_only"] for rank in on_ranks(2, coupled, ddp)) > 0.1


def coupled_exact_norm(wrap: Wrap) -> dict[str, float]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 5)).double()
    batch = pairs(11)
    loss = info_nce(learned=True).double()
    objective = Coupled(lambda model, pair: (model(pair[0]), model(pair[1])), loss)
    twin, twin_loss = copy.deepcopy(model), copy.deepcopy(loss)
    twin_loss((twin(batch[0]), twin(batch[1]))).backward()
    wrapped = wrap(model)
    Accumulator(wrapped, objective, micro_batch=2, batch_norm="exact").backward(own(batch, near_equal(11)))
    got, wanted = torch.cat([whole(wrapped), whole(loss)]), torch.cat([whole(twin), whole(twin_loss)])
    return {"error": float((got - wanted).norm() / wanted.norm())}


@cases((2, coupled_exact_norm, ddp), (2, coupled_exact_norm, fsdp_units), (3, coupled_exact_norm, fsdp_units))
def test_exact_batch_norm_under_a_coupled_loss(size, scenario, arguments):
    assert largest(on_ranks(size, scenario, *arguments), "error") < 1e-12

"""Terms and observed units over ranks: every rank has another part of every term, and one has nothing."""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch import Accumulator, Dealt, ExactnessError, Objective, Terms, Update, observed, rows
from anybatch.core import take_rows
from tests.parallel.wrapped import (
    BOTH,
    Wrap,
    ddp,
    error,
    largest,
    near_equal,
    network,
    num_targets,
    own,
    ragged,
    tokens,
)
from tests.processes.ranks import on_ranks, raised_on_ranks
from tests.reference import whole_batch_gradient


def both(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    outputs = model(batch[0])
    return {
        "tokens": F.cross_entropy(outputs.flatten(0, 1), batch[1].flatten()),
        "rows": outputs.mean(1).square().sum(1).mean(),
    }


def whole(model: nn.Module, batch: Any) -> Tensor:
    return both(model, batch)["tokens"] + 0.2 * both(model, batch)["rows"]


TERMS = Terms(both, units={"tokens": num_targets, "rows": rows}, weights={"rows": 0.2})


def accumulated(wrap: Wrap, kind: str, count: int) -> dict[str, float]:
    alone, batch = network(torch.float64), ragged(count)
    batch = batch[0].double(), batch[1]
    if count > 2:
        batch[1][-2:] = -100
    loss = whole if kind == "terms" else tokens
    reference = whole_batch_gradient(alone, loss, batch)
    model = wrap(copy.deepcopy(alone))
    objective = TERMS if kind == "terms" else observed(tokens)
    counts = near_equal(count)
    mine = own(batch, counts) if counts[torch.distributed.get_rank()] else None
    result = Accumulator(model, objective, micro_batch=2).backward(mine)
    return {
        "error": error(model, reference),
        "loss": float(result.loss) - float(loss(alone, batch).detach()),
        "term": float(result.metrics["tokens"]) - float(tokens(alone, batch).detach()) if kind == "terms" else 0.0,
        "units": result.units - (count if kind == "terms" else int(num_targets(batch))),
    }


def a_stand_in() -> dict[str, float]:
    """Two rows dealt to three ranks: the third runs a row that counts for nothing."""
    alone, batch = network(torch.float64), ragged(2)
    batch = batch[0].double(), batch[1]
    reference = whole_batch_gradient(alone, whole, batch)
    rank = torch.distributed.get_rank()
    rows_of = (rank,) if rank < 2 else ()
    model = ddp(copy.deepcopy(alone))
    Accumulator(model, TERMS, micro_batch=2).backward(Dealt(take_rows(batch, list(rows_of) or [0]), rows_of, 2))
    return {"error": error(model, reference)}


def one_rank_does_not_add_up() -> None:
    model = ddp(network())
    inputs, targets = ragged(16)
    targets[:8] = 1  # the rows of rank 0 are all of one length, and show nothing
    update = Update(model, torch.optim.SGD(model.parameters(), lr=0.1), Objective(tokens), micro_batch=4)
    update(own((inputs, targets), [8, 8]))


@BOTH
def test_terms_are_those_of_all_ranks(wrap):
    told = on_ranks(2, accumulated, wrap, "terms", 9)
    assert largest(told, "error") < 1e-14
    assert all(largest(told, key) < 1e-12 for key in ("loss", "term", "units"))


@BOTH
def test_observed_units_are_those_of_all_ranks(wrap):
    told = on_ranks(2, accumulated, wrap, "observed", 9)
    assert largest(told, "error") < 1e-14
    assert all(largest(told, key) < 1e-12 for key in ("loss", "units"))


def test_a_rank_without_a_row_has_no_part_in_any_term():
    told = on_ranks(3, accumulated, ddp, "terms", 2)
    assert largest(told, "error") < 1e-14
    assert largest(on_ranks(3, a_stand_in), "error") < 1e-14


def test_all_ranks_raise_where_the_losses_of_one_do_not_add_up():
    first, second = raised_on_ranks(2, one_rank_does_not_add_up)
    assert first.startswith(ExactnessError.__name__)
    assert "on another rank" in first
    assert "(units)" in second

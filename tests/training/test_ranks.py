"""The law over ranks: the built-in tasks on 1, 2 and 4 of them, DDP and FSDP2, end as one process with the whole batch does."""

import pytest
import torch
from rank_scenarios import (
    BATCH,
    KINDS,
    SIZES,
    TAIL,
    UPDATES,
    Changing,
    Spread,
    Stopped,
    settings,
    small,
    weights,
)
from torch import nn

from anybatch.batches import deal_rows
from anybatch.training.experiment import assemble
from anybatch.training.data import validation_loader
from anybatch.parallel import Ranks
from tests.parallel.ranks import outcomes

TASKS = ("textbook", "stdlib")
DTYPES = {"float64": torch.float64, "float32": torch.float32}
BOUND = {"float64": 1e-12, "float32": 1e-5}
SPREAD = [(name, size, kind, dtype) for name in TASKS for size in SIZES for kind in KINDS for dtype in DTYPES]


@pytest.fixture(scope="module")
def told():
    scenarios = {" ".join(map(str, case)): Spread(*case[:3], DTYPES[case[3]]) for case in SPREAD}
    scenarios |= {f"{first} 1 {last}": Changing("textbook", first, last) for first, last in (KINDS, KINDS[::-1])}
    for kind in KINDS:
        scenarios |= {
            f"{kind} straight": Stopped(kind, stop_after=None),
            f"{kind} stopped": Stopped(kind, stop_after=4),
            f"{kind} reseeded": Stopped(kind, stop_after=4, reseed=True),
        }
    return outcomes(scenarios, 4)


def whole_batches(name, dtype):
    """The same run by torch alone: the whole batch at once, one process; weights, and the loss of each update."""
    experiment = assemble(small(name, dtype), settings(name))
    task, model = experiment.task, experiment.task.model
    collate = task.collate or torch.utils.data.default_collate
    losses, epoch = [], 0
    while len(losses) < UPDATES:
        epoch += 1
        order = torch.randperm(len(task.training), generator=torch.Generator().manual_seed(epoch)).tolist()
        for start in range(0, len(order), BATCH[name]):
            batch = collate([task.training[row] for row in order[start : start + BATCH[name]]])
            task.optimizer.zero_grad()
            loss = task.whole_objective.loss(model, batch)
            loss = loss[0] if isinstance(loss, tuple) else loss
            loss.backward()
            if task.clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), task.clip_norm)
            task.optimizer.step()
            experiment.update.scheduler.step()
            losses.append(float(loss))
            if len(losses) == UPDATES:
                break
    return weights(model), losses


@pytest.fixture(scope="module")
def reference():
    known = {}

    def find(name, dtype):
        if (name, dtype) not in known:
            known[name, dtype] = whole_batches(name, DTYPES[dtype])
        return known[name, dtype]

    return find


def off(found, expected):
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize(("name", "size", "kind", "dtype"), SPREAD)
def test_a_task_on_any_number_of_ranks_ends_as_one_process_with_the_whole_batch(told, reference, name, size, kind, dtype):
    results = told[f"{name} {size} {kind} {dtype}"]
    expected, losses = reference(name, dtype)
    for result in results[:size]:
        assert not isinstance(result, str), result
        assert off(result[0], expected) < BOUND[dtype]
        found = [record for record in result[1] if record[0] and len(record) >= 5]
        assert [record[1] for record in found][: len(losses)] == pytest.approx(losses, rel=1e-5)
    assert all(torch.equal(result[0], results[0][0]) for result in results[:size])

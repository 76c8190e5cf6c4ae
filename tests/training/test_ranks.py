"""The law over ranks: the built-in tasks on 1, 2 and 4 of them, DDP and FSDP2, end as one process with the whole batch does."""

import pytest
import torch
from torch import nn

from anybatch.batches.dealing.dealt import deal_rows
from anybatch.parallel.ranks import Ranks
from anybatch.training.experiment import assemble
from anybatch.training.loaders import validation_loader
from anybatch.training.tasks.lookup import find_task
from tests.parallel.ranks import outcomes
from tests.training.rank_scenarios import (
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

pytestmark = pytest.mark.xdist_group("tasks on ranks")

TASKS = ("textbook", "stdlib", "pairs", "digits")
DTYPES = {"float64": torch.float64, "float32": torch.float32}
BOUND = {"float64": 1e-12, "float32": 1e-5}
SPREAD = [
    (name, size, kind, dtype)
    for name in TASKS
    for size in SIZES
    for kind in KINDS
    for dtype in DTYPES
    if dtype == "float64" or size == 4
]


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
    losses, epoch, seed = [], 0, experiment.settings.seed * 1_000_003
    while len(losses) < UPDATES:
        epoch += 1
        order = torch.randperm(len(task.training), generator=torch.Generator().manual_seed(seed + epoch)).tolist()
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
            losses.append(loss.item())
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


def losses_of(records):
    return [record[1] for record in records if len(record) == 6]  # an epoch's has 4 entries


def off(found, expected):
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize(("name", "size", "kind", "dtype"), SPREAD)
def test_a_task_on_any_number_of_ranks_ends_as_one_process_with_the_whole_batch(
    told, reference, name, size, kind, dtype
):
    results = told[f"{name} {size} {kind} {dtype}"]
    expected, losses = reference(name, dtype)
    for result in results[:size]:
        assert not isinstance(result, str), result
        assert off(result[0], expected) < BOUND[dtype]
        assert losses_of(result[1]) == pytest.approx(losses, rel=1e-4)
        assert torch.equal(result[0], results[0][0])  # statistics too: ranks do not drift apart


@pytest.mark.parametrize("name", TASKS)
def test_the_mean_over_ranks_of_each_ranks_mean_does_not(name):
    """What DDP does by itself, with 5 rows for 4 ranks: its gradient against the whole batch's."""
    task = small(name, torch.float64)()
    collate = task.collate or torch.utils.data.default_collate
    rows = [task.training[row] for row in range(5)]
    if name == "stdlib":
        ragged = sorted(find_task(name)().training, key=len)
        rows = [*ragged[-2:], *ragged[:3]]

    def gradient(parts):
        task.model.zero_grad()
        for part in parts:
            loss = task.whole_objective.loss(task.model, collate([rows[row] for row in part]))
            (loss[0] if isinstance(loss, tuple) else loss).div(len(parts)).backward()
        return torch.cat([parameter.grad.flatten() for parameter in task.model.parameters()])

    assert off(gradient(deal_rows(5, 4)), gradient([range(5)])) > 0.1


def test_the_last_batch_of_an_epoch_has_fewer_rows_than_four_ranks(told):
    rows = [record[4] for record in told["textbook 4 ddp float64"][0][1] if len(record) == 6]
    assert rows[6] == rows[13] == TAIL


@pytest.mark.parametrize("first", KINDS)
def test_two_ranks_then_one_process_then_four_ranks_end_as_if_never_changed(told, reference, first):
    last = next(kind for kind in KINDS if kind != first)
    for result in told[f"{first} 1 {last}"]:
        assert not isinstance(result, str), result
        assert off(result[0], reference("textbook", "float64")[0]) < 1e-12
        assert [record[0] for record in result[1] if len(record) == 6] == list(range(14, UPDATES + 1))


@pytest.mark.parametrize("kind", KINDS)
def test_on_the_same_ranks_a_stopped_run_ends_bit_for_bit_as_one_that_was_not(told, kind):
    straight, stopped = told[f"{kind} straight"], told[f"{kind} stopped"]
    assert torch.equal(straight[0][0], stopped[0][0])
    assert straight[0][1][-3:] == stopped[0][1][-3:]


@pytest.mark.parametrize("kind", KINDS)
def test_without_each_ranks_random_states_it_does_not(told, kind):
    assert not torch.equal(told[f"{kind} straight"][0][0], told[f"{kind} reseeded"][0][0])


def test_the_whole_of_the_validation_data_is_dealt_in_whole_batches_and_evenly():
    task = small("textbook", torch.float64)()  # 75 rows in batches of 16: five, the last of 11
    batches = [[len(batch[1]) for batch in validation_loader(task, Ranks(rank, 3))] for rank in range(3)]
    assert batches == [[16, 16], [16, 11], [16, 16]]  # the sixth stands in


@pytest.mark.parametrize(("name", "kind"), sorted({(name, kind) for name, _, kind, _ in SPREAD}))
def test_every_rank_tells_what_one_process_tells(told, name, kind):
    alone, four = (told[f"{name} {size} {kind} float64"] for size in (1, 4))
    for result in four:
        assert len(result[1]) == len(alone[0][1])
        for record, expected in zip(result[1], alone[0][1], strict=True):
            assert record == pytest.approx(expected, rel=1e-6)

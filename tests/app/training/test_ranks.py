"""The law over ranks: the built-in tasks on 1, 2 and 4 of them, DDP and FSDP2, end as one process with the whole batch does."""

import pickle
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset

from anybatch import Task, resume, supervised
from anybatch.app.records.schema import EpochDone, UpdateDone
from anybatch.app.training import loop
from anybatch.app.training.experiment import assemble
from anybatch.app.training.loop import Loop, Progress, validation_batches
from anybatch.app.training.settings import Settings
from anybatch.app.training.tasks import pairs, stdlib
from anybatch.app.training.tasks.lookup import find_task
from anybatch.core import Ranks
from anybatch.parallel import deal_rows
from tests.processes.ranks import on_ranks

TASKS = ("textbook", "stdlib", "pairs", "digits")
DTYPES = {"float64": torch.float64, "float32": torch.float32}
UPDATES = 10
PER_EPOCH = 4
"""Updates: three of whole batches, and the tail."""
WARMUP = 4
"""Of the tasks that warm up: then their learning rate decays."""
SIZES = (1, 2, 4)
KINDS = ("ddp", "fsdp2")
BATCH = {"textbook": 63, "stdlib": 9, "pairs": 27, "digits": 27}
MICRO_BATCH = {"textbook": 5, "pairs": 4, "digits": 4}
"""Rows; stdlib is cut by tokens."""
TAIL = 2
"""Rows of the last batch of an epoch: fewer than four ranks can share."""
SHORT = 49
"""Bytes of a row of stdlib, and one: enough to be ragged."""
SEED = {"digits": 2, "stdlib": 3}
"""With these, 10 updates in float32 cross no kink of ReLU, where rounding decides. With seed 0 they cross one: even the whole
batch at once leaves its run in float64, by 3e-5 and 9e-5. In float64 every seed holds."""


@pytest.fixture(scope="module", autouse=True)
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The first functions of the standard library in a file: to parse it takes seconds, and every rank would."""
    path = tmp_path_factory.mktemp("library") / "functions"
    path.write_bytes(pickle.dumps(stdlib.functions()[:2600]))
    return path


@cache
def functions_in(library: Path) -> tuple[stdlib.Function, ...]:
    found: tuple[stdlib.Function, ...] = pickle.loads(library.read_bytes())
    return found


def small(name: str, dtype: torch.dtype) -> Callable[[], Task]:
    """A built-in task with so few rows that 10 updates go through several epochs, each with a tail of `TAIL` rows."""

    def build() -> Task:
        task = find_task(name)()
        task.model.to(dtype)
        num_rows = (PER_EPOCH - 1) * BATCH[name] + TAIL
        parts = {field: getattr(task, field) for field in Task.__dataclass_fields__}
        if name == "stdlib":
            training = [row[:SHORT] for row in task.training[:num_rows]]
            validation = [row[:SHORT] for row in task.validation[:37]]
            parts |= {"validation_batch": 8}
        else:
            training = Subset(in_dtype(task.training, dtype), unlike(task.training)[:num_rows])
            validation = Subset(in_dtype(task.validation, dtype), unlike(task.validation)[:75])
            parts |= {"validation_batch": 16}
        return Task(**parts | {"training": training, "validation": validation})

    return build


def unlike(data: TensorDataset) -> list[int]:
    """Rows that have no twin before them: of two equal bodies, rounding decides which is found."""
    inputs, targets = data.tensors
    columns = [inputs] if targets.dim() == 1 else [inputs, targets]
    keys = [{row.numpy().tobytes(): number for number, row in reversed(list(enumerate(column)))} for column in columns]
    return sorted(set.intersection(*(set(first.values()) for first in keys)))


def in_dtype(data: TensorDataset, dtype: torch.dtype) -> TensorDataset:
    return TensorDataset(*(part.to(dtype) if part.is_floating_point() else part for part in data.tensors))


def settings(name: str, kind: str = "ddp") -> Settings:
    wish = Settings(batch_size=BATCH[name], micro_batch=MICRO_BATCH.get(name), updates=UPDATES, parallel=kind)
    return replace(wish, seed=SEED.get(name, 0), warmup=None if name == "textbook" else WARMUP)


def run(
    build: Callable[[], Task],
    wish: Settings,
    group: Any = None,
    *,
    folder: Path | None = None,
    stop_after: int | None = None,
    reseed: bool = False,
) -> tuple[Tensor, list[Any]]:
    """Train from the last checkpoint in `folder`, if any, on the ranks of `group`; weights, and what rank 0 would tell."""
    experiment = assemble(build, wish, group=group)
    told: list[Any] = []
    resumed = None if folder is None else resume(folder, experiment.update)
    progress = None if resumed is None else Progress.from_plain(resumed.progress, resumed.loader_state)
    if resumed is not None and reseed:
        torch.manual_seed(17)
    training = Loop(
        experiment,
        tell=told.append,
        checkpoints=folder,
        progress=progress,
        should_stop=lambda: training.progress.update == stop_after,
    )
    training.run()
    return weights(experiment.task.model), records(told)


def weights(model: nn.Module) -> Tensor:
    values = [value.full_tensor() if hasattr(value, "full_tensor") else value for value in model.state_dict().values()]
    return torch.cat([value.double().flatten() for value in values])


def records(told: list[Any]) -> list[Any]:
    return [
        (record.update, record.loss, record.grad_norm, record.units, record.rows, *record.metrics.values())
        if isinstance(record, UpdateDone)
        else (record.update, record.train_loss, record.valid_loss, *record.metrics.values())
        for record in told
        if isinstance(record, UpdateDone | EpochDone)
    ]


def spread(name: str, kind: str, dtype: str, library: Path) -> tuple[Tensor, list[Any]]:
    """A task on all ranks."""
    few = partial(functions_in, library)
    without_peak = mock.patch.object(loop, "MEMORY_AT", -1)  # to measure it takes as long as the updates
    with without_peak, mock.patch.object(stdlib, "functions", few), mock.patch.object(pairs, "functions", few):
        return run(small(name, DTYPES[dtype]), settings(name, kind), dist.group.WORLD)


def whole_batches(name: str, dtype: str) -> tuple[Tensor, list[float]]:
    """The same run by torch alone: the whole batch at once, one process; weights, and the loss of each update."""
    experiment = assemble(small(name, DTYPES[dtype]), settings(name))
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
def reference() -> Callable[[str, str], tuple[Tensor, list[float]]]:
    return cache(whole_batches)


def losses_of(told: list[Any]) -> list[float]:
    return [record[1] for record in told if len(record) == 6]  # an epoch's has 4 entries


def off(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", TASKS)
def test_a_task_on_any_number_of_ranks_ends_as_one_process_with_the_whole_batch(library, reference, name, size, kind):
    results = on_ranks(size, spread, name, kind, "float64", library)
    expected, losses = reference(name, "float64")
    for result in results:
        assert off(result[0], expected) < 1e-12
        assert losses_of(result[1]) == pytest.approx(losses, rel=1e-4)
        assert torch.equal(result[0], results[0][0])  # statistics too: ranks do not drift apart


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TASKS)
def test_in_float32_it_ends_as_near_as_rounding_allows(library, reference, name, kind):
    results = on_ranks(4, spread, name, kind, "float32", library)
    expected, losses = reference(name, "float32")
    # how far 10 updates carry a rounding depends on the processor's kernels: the whole batch at once shows it
    rounding = off(expected, reference(name, "float64")[0])
    assert rounding < 1e-3
    for result in results:
        assert off(result[0], expected) < max(1e-5, 2 * rounding)
        assert losses_of(result[1]) == pytest.approx(losses, rel=1e-4)
        assert torch.equal(result[0], results[0][0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TASKS)
def test_every_rank_tells_what_one_process_tells(library, name, kind):
    (alone,), four = (on_ranks(size, spread, name, kind, "float64", library) for size in (1, 4))
    for result in four:
        assert len(result[1]) == len(alone[1])
        for record, expected in zip(result[1], alone[1], strict=True):
            assert record == pytest.approx(expected, rel=1e-6)


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


def test_the_last_batch_of_an_epoch_has_fewer_rows_than_four_ranks(library):
    told = on_ranks(4, spread, "textbook", "ddp", "float64", library)[0][1]
    rows = [record[4] for record in told if len(record) == 6]
    assert rows[PER_EPOCH - 1] == rows[2 * PER_EPOCH - 1] == TAIL


def on_some(size: int, action: Callable[[Any], Any]) -> Any:
    """`action` with the group of the first `size` ranks; None on the others."""
    group = dist.new_group(list(range(size)))
    try:
        return action(group) if dist.get_rank() < size else None
    finally:
        dist.barrier()  # the others wait, also after an error


def shared_folder() -> Path:
    """The same new folder on every rank."""
    name = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(name)
    return Path(name[0])


def changing(name: str, first: str, last: str) -> tuple[Tensor, list[Any]]:
    """A task that begins on 2 ranks, goes on in one process, and ends on 4 ranks."""
    folder, build = shared_folder(), small(name, torch.float64)
    on_some(2, lambda group: run(build, settings(name, first), group, folder=folder, stop_after=3))
    on_some(1, lambda _: run(build, settings(name), None, folder=folder, stop_after=7))
    found: tuple[Tensor, list[Any]] = on_some(4, lambda group: run(build, settings(name, last), group, folder=folder))
    return found


@pytest.mark.parametrize(("first", "last"), [KINDS, KINDS[::-1]])
def test_two_ranks_then_one_process_then_four_ranks_end_as_if_never_changed(reference, first, last):
    for result in on_ranks(4, changing, "textbook", first, last):
        assert off(result[0], reference("textbook", "float64")[0]) < 1e-12
        assert [record[0] for record in result[1] if len(record) == 6] == list(range(8, UPDATES + 1))


def with_dropout() -> Task:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(75, 6, generator=generator)
    data = TensorDataset(inputs, (inputs[:, 0] > 0).long())
    model = nn.Sequential(nn.Linear(6, 12), nn.Dropout(0.5), nn.Linear(12, 2))
    return Task(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        objective=supervised(nn.CrossEntropyLoss()),
        training=data,
        validation=data,
    )


def stopped(kind: str, stop_after: int | None, reseed: bool = False) -> tuple[Tensor, list[Any]]:
    """A run with dropout, stopped and resumed; `reseed` forgets the random states."""
    folder = shared_folder()
    wish = Settings(batch_size=16, micro_batch=5, updates=9, parallel=kind)
    if stop_after is not None:
        run(with_dropout, wish, dist.group.WORLD, folder=folder, stop_after=stop_after)
    return run(with_dropout, wish, dist.group.WORLD, folder=folder, reseed=reseed)


@pytest.mark.parametrize("kind", KINDS)
def test_on_the_same_ranks_a_stopped_run_ends_bit_for_bit_as_one_that_was_not(kind):
    straight, resumed = on_ranks(2, stopped, kind, None), on_ranks(2, stopped, kind, 4)
    assert torch.equal(straight[0][0], resumed[0][0])
    assert straight[0][1][-3:] == resumed[0][1][-3:]


@pytest.mark.parametrize("kind", KINDS)
def test_without_each_ranks_random_states_it_does_not(kind):
    straight, reseeded = on_ranks(2, stopped, kind, None), on_ranks(2, stopped, kind, 4, reseed=True)
    assert not torch.equal(straight[0][0], reseeded[0][0])


def test_the_whole_of_the_validation_data_is_dealt_in_whole_batches_and_evenly():
    task = small("textbook", torch.float64)()  # 75 rows in batches of 16: five, the last of 11
    batches = [[len(batch[1]) for batch in validation_batches(task, Ranks(rank, 3))] for rank in range(3)]
    assert batches == [[16, 16], [16, 11], [16, 16]]  # the sixth stands in

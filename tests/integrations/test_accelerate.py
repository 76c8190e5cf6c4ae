"""Accelerate: an Update of prepared objects, with what would go wrong in silence refused or said."""

import os

import accelerate
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from anybatch import BatchError, ParallelError, UpdateError, supervised
from anybatch.integrations.accelerate import global_loader, prepared_update
from benchmarks.trainers import vector_of, whole
from tests.processes.ranks import on_ranks

EXACT = 5e-7
WEIGHT = torch.tensor([0.2, 1.0, 20.0])
OBJECTIVE = supervised(nn.CrossEntropyLoss(WEIGHT))


def data(count):
    torch.manual_seed(4)
    classes = torch.multinomial(torch.tensor([0.6, 0.35, 0.05]), count, replacement=True)
    return list(zip(torch.randn(count, 6), classes, strict=True))


def net():
    torch.manual_seed(0)
    return nn.Linear(6, 3)


def fresh(**options):
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    return accelerate.Accelerator(cpu=True, **options)


def wanted(model, rows):
    twin = nn.Linear(6, 3).double()
    twin.load_state_dict({name: whole(value) for name, value in model.state_dict().items()})
    x, y = (torch.stack(column) for column in zip(*rows, strict=True))
    nn.functional.cross_entropy(twin(x.double()), y, WEIGHT.double()).backward()
    return torch.cat([vector_of(parameter) for parameter in twin.parameters()])


def run(accelerator, count):
    """The largest error, the rows of each update on this process, and where the learning rate ended."""
    plain = net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 3)
    model, prepared, schedule = accelerator.prepare(plain, optimizer, schedule)
    update = prepared_update(accelerator, model, prepared, OBJECTIVE, micro_batch=5, scheduler=schedule)
    rows, found, dealt = data(count), [], []
    for number, batch in enumerate(global_loader(accelerator, rows, 24, shuffle=False)):
        goal = wanted(plain, rows[24 * number : 24 * (number + 1)])
        update(batch)
        gradient = torch.cat([vector_of(parameter) for parameter in plain.parameters()])
        found.append(float((gradient - goal).norm() / goal.norm()))
        dealt += [24 * number + row for row in batch.row_numbers]
    return max(found), dealt, optimizer.param_groups[0]["lr"]


def test_prepared_objects_are_exact_and_the_schedule_ends_at_its_end():
    error, rows, lr = run(fresh(), 57)
    assert error <= EXACT
    assert rows == list(range(57))
    assert lr == pytest.approx(0.0)


def test_a_killed_run_resumes_from_the_state_that_accelerate_saved(tmp_path):
    def start():
        accelerator, plain = fresh(), net()
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
        model, prepared = accelerator.prepare(plain, optimizer)
        return accelerator, plain, prepared_update(accelerator, model, prepared, OBJECTIVE, micro_batch=5)

    def batches(accelerator):
        return list(global_loader(accelerator, data(57), 24))

    accelerator, whole, update = start()
    first, *rest = batches(accelerator)
    update(first)
    accelerator.save_state(str(tmp_path))
    for batch in rest:
        update(batch)
    accelerator, resumed, update = start()
    accelerator.load_state(str(tmp_path))
    for batch in batches(accelerator)[1:]:
        update(batch)
    assert all(torch.equal(one, other) for one, other in zip(whole.parameters(), resumed.parameters(), strict=True))


def on_processes(what, *arguments):
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}
    os.environ.update({name: str(value) for name, value in names.items()})
    try:
        return globals()[what](*arguments)
    finally:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            del os.environ[name]


def dealt_run(count):
    return run(fresh(), count)


def sharded_run(count):
    """FSDP2, as `accelerate launch --use_fsdp` sets it up on a device: on a CPU, Accelerate passes over it and takes DDP."""
    accelerator = fresh()
    accelerator.state.distributed_type = accelerate.DistributedType.FSDP
    plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=1
    )
    accelerator.state.fsdp_plugin = plugin
    return run(accelerator, count)


def test_a_model_that_accelerate_sharded_is_exact():
    (error, first, lr), (_, second, _) = on_ranks(2, on_processes, "sharded_run", 49)
    assert error <= EXACT
    assert sorted(first + second) == list(range(49))
    assert lr == pytest.approx(0.0)


@pytest.mark.parametrize("count", [33, 57, 61, 49])
def test_on_two_processes_every_row_counts_once_and_the_schedule_steps_once(count):
    (error, first, lr), (_, second, _) = on_ranks(2, on_processes, "dealt_run", count)
    assert error <= EXACT
    assert sorted(first + second) == list(range(count))
    assert lr == pytest.approx(0.1 * (1 - -(-count // 24) / 3))


def refusals():
    """What is refused or said on two processes: the messages."""
    told = []
    accelerator = fresh()
    plain = net()
    optimizer = accelerator.prepare(torch.optim.SGD(plain.parameters(), lr=0.1))
    with pytest.raises(ParallelError) as caught:
        prepared_update(accelerator, plain, optimizer, OBJECTIVE, micro_batch=5)
    told.append(str(caught.value))
    model = accelerator.prepare(plain)
    update = prepared_update(accelerator, model, optimizer, OBJECTIVE, micro_batch=5)
    x, y = (torch.stack(column) for column in zip(*data(12), strict=True))
    with pytest.raises(ParallelError) as caught, accelerator.no_sync(model):
        update((x, y))
    told.append(str(caught.value))
    accelerator.prepare(DataLoader(data(57), batch_size=8))
    with pytest.warns(UserWarning, match="repeats 7 of them"):
        prepared_update(accelerator, model, optimizer, OBJECTIVE, micro_batch=5)
    accelerator = fresh(dataloader_config=accelerate.DataLoaderConfiguration(even_batches=False))
    model = accelerator.prepare(net())
    accelerator.prepare(DataLoader(data(50), batch_size=8))
    with pytest.raises(BatchError) as caught:
        prepared_update(accelerator, model, torch.optim.SGD(model.parameters(), lr=0.1), OBJECTIVE, micro_batch=5)
    told.append(str(caught.value))
    return told


def test_on_two_processes_what_goes_wrong_in_silence_is_told():
    (unprepared, unsynced, uneven), _ = on_ranks(2, on_processes, "refusals")
    assert "spread over 1 of 2 processes" in unprepared
    assert "no_sync" in unsynced
    assert "even_batches=False leaves 50 rows in 7 batches" in uneven


def test_accumulation_by_accelerate_too_is_refused():
    accelerator = fresh(gradient_accumulation_steps=4)
    model = net()
    with pytest.raises(UpdateError, match="gradient_accumulation_steps=4"):
        prepared_update(accelerator, model, torch.optim.SGD(model.parameters(), lr=0.1), OBJECTIVE, micro_batch=5)


def test_an_accelerate_that_hides_its_loaders_is_refused_by_name(monkeypatch):
    accelerator = fresh()
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    monkeypatch.delattr(accelerator, "_dataloaders")
    with pytest.raises(ParallelError, match=r"does not say which loaders it prepared"):
        prepared_update(accelerator, model, optimizer, supervised(nn.CrossEntropyLoss()), micro_batch=2)

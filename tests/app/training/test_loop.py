import math

import pytest
import torch

from anybatch import SettingsError, TaskError, resume, supervised
from anybatch.app.records.schema import EpochDone, MemorySeen, UpdateDone, WindowSeen
from anybatch.app.training.experiment import assemble, find_device
from anybatch.app.training.loop import Loop, Progress, training_loader, validate
from anybatch.app.training.settings import Settings
from anybatch.app.training.tasks.lookup import find_task
from tests.app.training.small_tasks import small_task

UPDATES = 15  # 3 epochs of 75 rows in batches of 16


def run(settings=None, *, checkpoints=None, build=small_task, stop_after=None, from_checkpoint=None):
    experiment = assemble(build, settings or Settings())
    told = []
    progress = None
    if from_checkpoint is not None:
        resumed = resume(from_checkpoint, experiment.update)
        progress = Progress.from_plain(resumed.progress, resumed.loader_state)
    loop = Loop(
        experiment,
        tell=told.append,
        checkpoints=checkpoints,
        progress=progress,
        should_stop=lambda: stop_after is not None and loop.progress.update >= stop_after,
    )
    loop.run()
    return loop, told


def state_of(loop):
    update = loop.experiment.update
    moments = [value for state in update.optimizer.state.values() for value in state.values()]
    return [*update.model.state_dict().values(), *moments, torch.get_rng_state()]


def is_same(one, other):
    return all(torch.equal(a, b) for a, b in zip(state_of(one), state_of(other), strict=True))


@pytest.fixture(scope="module")
def straight():
    loop, told = run()
    return [value.clone() for value in state_of(loop)], told


@pytest.mark.parametrize("stop_after", range(UPDATES + 1))
def test_a_run_stopped_after_any_update_ends_bit_for_bit_as_one_that_was_not(tmp_path, straight, stop_after):
    stopped, told = run(checkpoints=tmp_path, stop_after=stop_after)
    assert stopped.progress.update == stop_after
    resumed, told_later = run(checkpoints=tmp_path, from_checkpoint=tmp_path)
    assert resumed.is_finished
    for value, expected in zip(state_of(resumed), straight[0], strict=True):
        assert torch.equal(value, expected)
    assert records(told + told_later) == records(straight[1])


def records(told):
    return [
        (record.update, record.epoch, record.loss, record.rows)
        if isinstance(record, UpdateDone)
        else (record.update, record.epoch, record.train_loss, record.valid_loss, record.metrics, record.train_metrics)
        for record in told
        if isinstance(record, (UpdateDone, EpochDone))
    ]


def test_without_the_position_in_the_data_it_does_not(tmp_path, straight):
    run(checkpoints=tmp_path, stop_after=7)
    experiment = assemble(small_task, Settings())
    resumed = resume(tmp_path, experiment.update)
    loop = Loop(experiment, tell=lambda _: None, progress=Progress.from_plain(resumed.progress, None))
    loop.run()
    assert not all(torch.equal(value, other) for value, other in zip(state_of(loop), straight[0], strict=True))


def test_the_same_seed_is_the_same_run_and_another_seed_is_not():
    one, other = run()[0], run()[0]
    assert is_same(one, other)
    assert not is_same(one, run(Settings(seed=1))[0])


def test_every_row_is_learned_from_once_an_epoch_the_tail_included(straight):
    rows = [record.rows for record in straight[1] if isinstance(record, UpdateDone)]
    assert rows == [16, 16, 16, 16, 11] * 3


def test_the_order_differs_from_epoch_to_epoch_and_is_the_same_for_the_same_seed():
    def order(seed, epoch):
        loader = training_loader(small_task(), batch=16, seed=seed, epoch=epoch)
        return torch.cat([inputs[:, 0] for inputs, _ in loader])

    assert torch.equal(order(0, 1), order(0, 1))
    assert not torch.equal(order(0, 1), order(0, 2))
    assert not torch.equal(order(0, 1), order(1, 1))
    assert torch.equal(order(0, 1).sort().values, order(0, 2).sort().values)


def test_the_plan_says_what_happens(straight):
    loop, told = run(Settings(batch_size=32, micro_batch=8, lr_rule="linear", base_batch=16, warmup=2, epochs=4))
    plan = loop.experiment.plan
    updates = [record for record in told if isinstance(record, UpdateDone)]
    assert plan.updates == len(updates) == 12
    assert plan.updates_per_epoch == 3
    assert plan.micro_batches_per_update == updates[0].micro_batches == 4
    lrs = [record.lr for record in updates]
    assert lrs[0] == pytest.approx(plan.lr_first)
    assert max(lrs) == pytest.approx(plan.lr_peak) == pytest.approx(0.02)
    assert lrs[-1] == pytest.approx(plan.lr_last)
    assert loop.experiment.update.optimizer.param_groups[0]["betas"][1] == pytest.approx(plan.beta2) == 0.999**2


def test_updates_stop_a_run_in_the_middle_of_an_epoch_and_it_is_validated():
    _, told = run(Settings(updates=7))
    assert sum(isinstance(record, UpdateDone) for record in told) == 7
    epochs = [record for record in told if isinstance(record, EpochDone)]
    assert [(record.epoch, record.update) for record in epochs] == [(1, 5), (2, 7)]


def test_an_epochs_loss_is_the_unit_weighted_mean_of_its_updates(straight):
    updates = [record for record in straight[1] if isinstance(record, UpdateDone) and record.epoch == 2]
    epoch = next(record for record in straight[1] if isinstance(record, EpochDone) and record.epoch == 2)
    mean = sum(record.loss * record.rows for record in updates) / sum(record.rows for record in updates)
    assert epoch.train_loss == pytest.approx(mean)


def test_one_timeline_and_one_memory_curve_are_recorded(straight):
    windows = [record for record in straight[1] if isinstance(record, WindowSeen)]
    memories = [record for record in straight[1] if isinstance(record, MemorySeen)]
    assert [record.update for record in windows] == [2]
    assert [record.update for record in memories] == [3]
    assert {stage.stage for stage in windows[0].stages} >= {"zero", "load", "forward", "loss", "backward", "step"}
    assert [stage.micro_batch for stage in windows[0].stages if stage.stage == "load"] == [0, 1, 2, 3]
    assert [(part.rows, part.units, part.share) for part in windows[0].micro_batches] == [(4, 4.0, 0.25)] * 4


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_runs_and_stays_finite(precision):
    loop, told = run(Settings(precision=precision, epochs=1))
    assert all(math.isfinite(record.loss) for record in told if isinstance(record, UpdateDone))
    assert (loop.experiment.update.scaler is not None) == (precision == "fp16")


def test_clipping_is_handed_on():
    assert run(Settings(clip_norm=0.5, updates=1))[0].experiment.update.clip_norm == 0.5


def test_validation_equals_one_batch_of_everything_and_leaves_the_mode():
    task = small_task()
    task.model.train()
    batches = [task.validation[:7], task.validation[7:20], task.validation[20:]]
    found = validate(task.model, task.objective, batches, torch.device("cpu"))
    assert task.model.training
    task.model.eval()
    outputs = task.model(task.validation.tensors[0]).detach()
    targets = task.validation.tensors[1]
    assert found.loss == pytest.approx(float(torch.nn.functional.cross_entropy(outputs, targets)))
    assert found.metrics["accuracy"] == pytest.approx(float((outputs.argmax(1) == targets).float().mean()))


def test_a_metric_that_the_objective_does_not_report_is_named_with_those_it_does():
    with pytest.raises(TaskError, match=r"judged by 'f1', but its objective reports accuracy"):
        run(Settings(updates=1), build=lambda: small_task(metric="f1"))


def test_a_task_without_a_metric_is_judged_by_its_loss():
    loop, told = run(build=lambda: small_task(metric=None, objective=supervised(torch.nn.CrossEntropyLoss())))
    losses = [record.valid_loss for record in told if isinstance(record, EpochDone)]
    assert loop.progress.best == min(losses)


def test_an_unknown_device_is_named():
    with pytest.raises(SettingsError, match="--device 'toaster' cannot be used"):
        find_device("toaster")
    with pytest.raises(SettingsError, match="meta"):
        find_device("meta")


def test_a_warm_up_longer_than_the_run_is_refused():
    with pytest.raises(SettingsError, match="--warmup 20: the run has 15 updates"):
        assemble(small_task, Settings(warmup=20))


def test_a_task_that_brings_its_own_scheduler_is_told_where_it_belongs():
    def build():
        task = small_task()
        torch.optim.lr_scheduler.ConstantLR(task.optimizer)
        return task

    with pytest.raises(TaskError, match="already has a scheduler"):
        assemble(build, Settings())


def test_a_loss_that_is_a_sum_is_given_per_unit_in_training_and_validation():
    def build():
        return small_task(objective=supervised(torch.nn.CrossEntropyLoss(reduction="sum")), metric=None)

    _, told = run(Settings(updates=5, lr=1e-9), build=build)
    epoch = next(record for record in told if isinstance(record, EpochDone))
    updates = [record for record in told if isinstance(record, UpdateDone)]
    assert epoch.train_loss == pytest.approx(sum(record.loss for record in updates) / 75)
    assert 0.3 < epoch.valid_loss < 1.5


def test_the_plan_knows_of_layers_that_keep_the_gradient_from_being_exact():
    assert run(Settings(updates=1))[0].experiment.plan.batch_norms == 1
    assert assemble(find_task("textbook"), Settings()).plan.batch_norms == 0

"""Batches that grow: which updates have which, what the learning rate and beta2 make of it, and that a resume goes on."""

import math

import pytest
import torch

from anybatch.app.records.schema import UpdateDone
from anybatch.app.training.checkpoints import resume
from anybatch.app.training.experiment import assemble
from anybatch.app.training.learning_rates import BatchSchedule, schedule_of
from anybatch.app.training.loop import Loop, Progress
from anybatch.app.training.settings import Settings
from anybatch.errors import SettingsError
from anybatch.noise import NoiseScale
from tests.app.training.small_tasks import small_task

GROWING = {1: 10, 2: 25, 3: 75}


def run(tmp_path, *, stop_after: int | None = None, progress: Progress | None = None, **changes):
    changes = {"batch_schedule": GROWING, "decay": "none", "lr_rule": "sqrt", "base_batch": 10, **changes}
    experiment = assemble(lambda: small_task(**changes), Settings())
    if progress is not None:
        resumed = resume(tmp_path, experiment.update)
        progress = Progress.from_plain(resumed.progress, resumed.loader_state)
    seen: list[UpdateDone] = []

    def tell(metric):
        if isinstance(metric, UpdateDone):
            seen.append(metric)

    def should_stop():
        return stop_after is not None and len(seen) >= stop_after

    Loop(experiment, tell=tell, checkpoints=tmp_path, progress=progress, should_stop=should_stop).run()
    return experiment, seen


def test_rows_learning_rate_and_beta2_follow_the_schedule(tmp_path):
    experiment, seen = run(tmp_path)
    assert [done.rows for done in seen] == [10] * 7 + [5] + [25] * 3 + [75]
    assert [done.lr for done in seen] == pytest.approx([0.01] * 8 + [0.01 * 2.5**0.5] * 3 + [0.01 * 7.5**0.5])
    assert experiment.task.optimizer.param_groups[0]["betas"][1] == pytest.approx(0.999**7.5)
    assert (experiment.plan.updates, experiment.plan.epochs) == (12, 3)
    assert experiment.plan.batch_schedule == "10 rows from epoch 1, 25 rows from epoch 2, 75 rows from epoch 3"


def test_decay_goes_by_rows_so_that_it_ends_with_the_run(tmp_path):
    _, seen = run(tmp_path, decay="linear", lr_rule="none")
    assert [done.lr for done in seen][8:] == pytest.approx([0.01 * 2 / 3, 0.01 * 5 / 9, 0.01 * 4 / 9, 0.01 / 3])


@pytest.mark.parametrize("stop_after", [3, 9])
def test_a_run_that_was_stopped_ends_with_the_same_weights(tmp_path, stop_after):
    through, _ = run(tmp_path / "through")
    run(tmp_path / "stopped", stop_after=stop_after)
    resumed, _ = run(tmp_path / "stopped", progress=Progress())
    pairs = zip(through.task.model.parameters(), resumed.task.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_a_batch_size_that_was_asked_for_stays():
    task = small_task(batch_schedule=GROWING)
    assert assemble(lambda: task, Settings(batch_size=20)).schedule.steps == {1: 20}


@pytest.mark.parametrize(
    ("low", "rows"), [(31.0, 16), (32.0, 32), (math.inf, 32)], ids=["not sure", "sure", "no signal"]
)
def test_noise_doubles_the_batch_where_it_is_surely_that_large(low, rows):
    schedule = BatchSchedule({1: 16}, 75, follows_noise=True)
    schedule.follow(2, NoiseScale(rows=100.0, low=low, high=math.inf, windows=9))
    assert (schedule.batch(1), schedule.batch(2)) == (16, rows)
    schedule.follow(3, None)
    assert schedule.batch(3) == rows


def test_noise_as_a_guide_trains_to_the_end_of_its_epochs(tmp_path):
    experiment, seen = run(tmp_path, batch_schedule="noise", batch_size=8, micro_batch=4, epochs=6)
    assert len(seen) == experiment.schedule.updates_before(7)
    assert experiment.schedule.largest == 75
    assert max(done.noise_scale or 0 for done in seen) > 0


@pytest.mark.parametrize("given", [{2: 32}, {1: 0}, {}, {1: 2.5}, "noisy"])
def test_what_is_no_schedule_is_refused(given):
    with pytest.raises(SettingsError, match="batch_schedule="):
        schedule_of(given, batch=16, rows=75)

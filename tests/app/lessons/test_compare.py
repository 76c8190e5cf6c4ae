import pytest
import torch

from anybatch import SettingsError
from anybatch.app.lessons.arms import arms_of, compare, findings, run_usual_loop
from anybatch.app.records.schema import Arm, ArmEpoch, ArmRun
from anybatch.app.training.experiment import assemble
from anybatch.app.training.loop import training_loader
from anybatch.app.training.settings import Settings
from tests.app.training.small_tasks import small_task


@pytest.fixture(scope="module")
def comparison():
    return compare(small_task, Settings(epochs=2, micro_batch=4), num_seeds=2, tell=lambda *_: None)


def test_every_arm_runs_with_every_seed_for_every_epoch(comparison):
    assert [arm.name for arm in comparison.arms] == ["small batch", "usual loop", "exact batch", "exact + rule"]
    for arm in comparison.arms:
        assert [run.seed for run in arm.runs] == [0, 1]
        assert [[epoch.epoch for epoch in run.epochs] for run in arm.runs] == [[1, 2], [1, 2]]
        assert all(run.peak_bytes > 0 for run in arm.runs)


def test_updates_and_samples_are_what_each_loop_really_does(comparison):
    small, usual, exact, scaled = (arm.runs[0] for arm in comparison.arms)
    # 75 rows: 19 micro-batches of 4 (the last has 3), 4 whole windows of 4, 5 batches of 16 (the last has 11)
    assert (small.updates, small.samples_seen) == (38, 150)
    assert (usual.updates, usual.samples_seen) == (8, 128)
    assert (exact.updates, exact.samples_seen) == (10, 150)
    assert (scaled.updates, scaled.samples_seen) == (10, 150)


def test_memory_is_that_of_training_and_not_the_copy_of_torchs_random_state(comparison):
    small, usual, exact, _ = (arm.runs[0].peak_bytes for arm in comparison.arms)
    copied = torch.get_rng_state().nbytes  # what only the exact arms keep, to start a batch again
    assert abs(exact - usual) < copied
    assert abs(exact - small) < copied


def test_the_rule_starts_from_the_small_batch_and_suits_the_optimizer():
    adam = arms_of(small_task(), Settings(micro_batch=4))
    assert adam[3].lr == pytest.approx(2 * adam[2].lr)
    model = small_task().model
    sgd_task = small_task(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    assert arms_of(sgd_task, Settings(micro_batch=4))[3].lr == pytest.approx(0.4)
    assert arms_of(sgd_task, Settings(micro_batch=4, lr_rule="sqrt"))[3].lr == pytest.approx(0.2)


def test_the_usual_loop_is_the_loop_that_people_write():
    def build():
        torch.manual_seed(0)
        model = torch.nn.Linear(6, 2)
        return small_task(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), decay="none")

    experiment = assemble(build, Settings(micro_batch=4, updates=4))
    found = run_usual_loop(experiment, epochs=1, tell=lambda _: None)
    reference = build()
    criterion = torch.nn.CrossEntropyLoss()
    for step, (inputs, targets) in enumerate(training_loader(reference, batch=4, seed=0, epoch=1), start=1):
        (criterion(reference.model(inputs), targets) / 4).backward()
        if step % 4 == 0:
            reference.optimizer.step()
            reference.optimizer.zero_grad()
    assert found.updates == 4
    for one, other in zip(experiment.task.model.parameters(), reference.model.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_a_comparison_of_one_micro_batch_with_itself_is_refused():
    with pytest.raises(SettingsError, match="--micro-batch 16 with --batch-size 16"):
        compare(small_task, Settings(micro_batch=16), num_seeds=1, tell=lambda *_: None)
    with pytest.raises(SettingsError, match="--seeds 0"):
        compare(small_task, Settings(), num_seeds=0, tell=lambda *_: None)


def arm(name, batch, firsts, lasts, samples=1000, updates=10, peak=1000):
    runs = tuple(
        ArmRun(
            seed=seed,
            updates=updates,
            samples_seen=samples,
            seconds=1.0,
            peak_bytes=peak,
            epochs=(
                ArmEpoch(epoch=1, train_loss=1.0, valid_loss=1.0, metric=first),
                ArmEpoch(epoch=2, train_loss=0.5, valid_loss=0.5, metric=last),
            ),
        )
        for seed, (first, last) in enumerate(zip(firsts, lasts, strict=True))
    )
    return Arm(name=name, description="", batch=batch, micro_batch=16, lr=0.1, runs=runs)


def found(small, usual, exact, scaled, metric="accuracy", **usual_changes):
    arms = (
        arm("small batch", 16, *small, updates=126, peak=900),
        arm("usual loop", 64, *usual, **usual_changes),
        arm("exact batch", 64, *exact),
        arm("exact + rule", 64, *scaled),
    )
    return findings(arms, metric, rows=500)


FAST = ([0.96, 0.97], [0.98, 0.98])
SLOW = ([0.84, 0.85], [0.90, 0.91])


def test_a_larger_batch_that_is_slower_is_called_slower_with_both_numbers():
    first = found(FAST, SLOW, SLOW, FAST)[0]
    assert "84.5 ± 0.7 % accuracy" in first
    assert "96.5 ± 0.7 %" in first
    assert "learns more slowly per epoch: it makes 5 updates per epoch against 63" in first


def test_and_one_that_is_not_is_not():
    assert "the larger batch is ahead" in found(SLOW, SLOW, FAST, FAST)[0]
    assert "no clear difference" in found(FAST, FAST, FAST, FAST)[0]
    noisy = ([0.70, 0.99], [0.98, 0.98])
    assert "no clear difference" in found(FAST, noisy, noisy, noisy)[0]


def test_the_rule_is_said_to_help_only_where_it_does():
    assert "better than without the rule, and level with batches of 16" in found(FAST, SLOW, SLOW, FAST)[1]
    assert "not clearly different from without, and still behind" in found(FAST, SLOW, SLOW, SLOW)[1]
    assert "worse than without the rule" in found(FAST, FAST, FAST, SLOW)[1]


def test_the_dropped_tail_is_counted_and_none_is_none():
    assert "leaves 20 of 500 rows out" in found(FAST, SLOW, SLOW, FAST, samples=960)[3]
    assert "sees every row here" in found(FAST, SLOW, SLOW, FAST)[3]


def test_for_a_loss_lower_is_better():
    low, high = ([0.2, 0.2], [0.1, 0.1]), ([0.9, 0.9], [0.8, 0.8])
    said = found(low, high, high, low, metric=None)
    assert "learns more slowly" in said[0]
    assert "0.9000 ± 0.0000 validation loss" in said[0]
    assert "small batch better than exact batch" in said[2]


def test_one_seed_says_so_and_shows_no_deviation():
    said = found(([0.96], [0.98]), ([0.84], [0.9]), ([0.84], [0.9]), ([0.96], [0.98]))
    assert "One seed" in said[0]
    assert "±" not in said[0]


def test_batch_norm_is_owned_up_to(comparison):
    assert "not quite exact here: BatchNorm (1 layer)" in comparison.findings[-1]
    assert not any("BatchNorm" in sentence for sentence in found(FAST, FAST, FAST, FAST))

"""`anybatch compare`: train a task in four ways over several seeds, and describe the differences."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch.nn.utils import clip_grad_norm_

from anybatch.app.records import schema
from anybatch.app.records.schema import Arm, ArmEpoch, ArmRun, Comparison, Spread, at_epoch, over_runs
from anybatch.app.training import loop
from anybatch.app.training.experiment import Experiment, assemble, find_device, make_plan, num_inexact_norms
from anybatch.app.training.learning_rates import ADAMS
from anybatch.app.training.measure import profiled
from anybatch.app.training.ranks import seed_all
from anybatch.app.training.settings import LRRule, Settings
from anybatch.app.training.tasks.task import Task
from anybatch.core import Batch, ForwardPass, checked_loss, count_units, num_rows, windows
from anybatch.display import plural, show_bytes
from anybatch.errors import SettingsError
from anybatch.memory import bytes_of, drop_gradients, optimizer_tensors

Tell = Callable[["ArmPlan", int, ArmEpoch], None]
"""Called with (arm, seed, epoch) after each epoch of each run."""


@dataclass(frozen=True, slots=True)
class ArmPlan:
    """One way of training, before it has run."""

    name: str
    description: str
    settings: Settings
    epochs: int
    lr: float
    is_usual_loop: bool = False


def compare(build: Callable[[], Task], settings: Settings, *, num_seeds: int, tell: Tell) -> Comparison:
    """Run every arm with every seed. All arms of a seed have the same first weights and the same order of rows."""
    if num_seeds < 1:
        raise SettingsError(f"--seeds {num_seeds}: expected 1 or more.")
    seed_all(settings.seed)
    task = build()
    arms = []
    for plan in arms_of(task, settings):
        runs = tuple(_run(build, plan, settings.seed + number, tell) for number in range(num_seeds))
        batch, micro_batch = plan.settings.batch_size or task.batch_size, _rows(task, plan.settings)
        sizes = {"batch": batch, "micro_batch": micro_batch}
        arms.append(Arm(name=plan.name, description=plan.description, lr=plan.lr, runs=runs, **sizes))
    found = findings(arms, task.metric, rows=len(task.training), num_batch_norms=num_inexact_norms(task))
    return Comparison(metric=task.metric or "validation loss", arms=tuple(arms), findings=found)


def arms_of(task: Task, settings: Settings) -> tuple[ArmPlan, ...]:
    """Return the four arms. The learning rate is that of the small batch, and the rule scales it from there."""
    batch = settings.batch_size or task.batch_size
    micro_batch = _rows(task, settings)
    if micro_batch >= batch:
        raise SettingsError(
            f"--micro-batch {micro_batch} with --batch-size {batch}: a comparison needs a batch of two micro-batches or more."
        )
    epochs = settings.epochs or task.epochs
    rule: LRRule = settings.lr_rule or ("sqrt" if isinstance(task.optimizer, ADAMS) else "linear")
    common = dataclasses.replace(settings, micro_batch=micro_batch, epochs=epochs, lr_rule="none")
    small = dataclasses.replace(common, batch_size=micro_batch)
    whole = dataclasses.replace(common, batch_size=batch)
    scaled = dataclasses.replace(whole, lr_rule=rule, base_batch=micro_batch)
    num_micro = -(-batch // micro_batch)
    usual_updates = -(-len(task.training) // micro_batch) // num_micro * epochs  # only whole windows make one
    if usual_updates == 0:
        raise SettingsError(
            f"--batch-size {batch} in micro-batches of {micro_batch}: the usual loop would never step on "
            f"{len(task.training)} rows. Give a smaller batch."
        )
    device = find_device(settings.device)
    lrs = [make_plan(task, each, device).lr_peak for each in (small, whole, scaled)]
    usual = dataclasses.replace(whole, epochs=None, updates=usual_updates)
    in_parts = f"{num_micro} micro-batches of {micro_batch}, each loss divided by {num_micro}; the tail is dropped"
    in_one = f"the gradient of all {batch} rows, in micro-batches of {micro_batch}, the same learning rate"
    by_rule = f"the same with the {rule} rule: learning rate {lrs[1]:.4g} -> {lrs[2]:.4g}"
    return (
        ArmPlan("small batch", f"an update after every {micro_batch} rows", small, epochs, lrs[0]),
        ArmPlan("usual loop", in_parts, usual, epochs, lrs[1], is_usual_loop=True),
        ArmPlan("exact batch", in_one, whole, epochs, lrs[1]),
        ArmPlan("exact + rule", by_rule, scaled, epochs, lrs[2]),
    )


def _rows(task: Task, settings: Settings) -> int:
    if settings.micro_batch == "auto":
        raise SettingsError(
            "--micro-batch auto: the arms of a comparison need one number of rows, such as --micro-batch 16."
        )
    return settings.micro_batch or task.micro_batch


def _run(build: Callable[[], Task], plan: ArmPlan, seed: int, tell: Tell) -> ArmRun:
    experiment = assemble(build, dataclasses.replace(plan.settings, seed=seed))

    def tell_epoch(epoch: ArmEpoch) -> None:
        tell(plan, seed, epoch)

    if plan.is_usual_loop:
        return run_usual_loop(experiment, epochs=plan.epochs, tell=tell_epoch)
    return _run_exact(experiment, seed, tell_epoch)


def _run_exact(experiment: Experiment, seed: int, tell: Callable[[ArmEpoch], None]) -> ArmRun:
    epochs: list[ArmEpoch] = []
    updates: list[schema.UpdateDone] = []
    peaks: list[int] = []
    random_state = torch.get_rng_state().nbytes if experiment.device.type == "cpu" else 0

    def take(metric: schema.Metric) -> None:
        if isinstance(metric, schema.UpdateDone):
            updates.append(metric)
        elif isinstance(metric, schema.MemorySeen):
            # the snapshot of torch's random state, kept for a retry, is not memory of training
            peaks.append((metric.peak_bytes or 0) - random_state)
        elif isinstance(metric, schema.EpochDone):
            epochs.append(
                _arm_epoch(experiment.task, metric.epoch, metric.train_loss, metric.valid_loss, metric.metrics)
            )
            tell(epochs[-1])

    loop.Loop(experiment, tell=take).run()
    samples, seconds = sum(done.rows or 0 for done in updates), sum(done.seconds or 0.0 for done in updates)
    return ArmRun(
        seed=seed,
        updates=len(updates),
        samples_seen=samples,
        seconds=seconds,
        peak_bytes=max(peaks, default=None),
        epochs=tuple(epochs),
    )


def run_usual_loop(experiment: Experiment, *, epochs: int, tell: Callable[[ArmEpoch], None]) -> ArmRun:
    """Train as most accumulation loops do: divide each loss by N, step after N micro-batches, drop the tail."""
    task, plan, seed = experiment.task, experiment.plan, experiment.settings.seed
    micro_batch, accumulate = plan.micro_batch, plan.micro_batches_per_update
    assert isinstance(micro_batch, int), "arms of a comparison are cut by rows"
    assert accumulate is not None
    updates, samples, peak = 0, 0, None
    done: list[ArmEpoch] = []
    seconds = 0.0
    for epoch in range(1, epochs + 1):
        task.model.train()
        task.optimizer.zero_grad()
        total_loss = total_units = 0.0
        began = perf_counter()
        loader = loop.training_loader(task, batch=micro_batch, seed=seed, epoch=epoch)
        for window in windows(loop.all_batches(loader, expected=len(loader), data="training"), accumulate):
            if len(window) < accumulate:
                break  # no step follows the gradients of the tail
            if updates + 1 == loop.MEMORY_AT and experiment.device.type == "cpu":
                loss, units, peak = _learn_measured(experiment, window.micro_batches)
            else:
                loss, units = _learn(experiment, window.micro_batches)
            updates += 1
            samples += sum(num_rows(micro_batch) for micro_batch in window)
            total_loss, total_units = total_loss + loss, total_units + units
        seconds += perf_counter() - began
        validated = loop.validate(task.model, task.whole_objective, loop.validation_batches(task), experiment.device)
        train_loss = total_loss / total_units if total_units else float("nan")
        done.append(_arm_epoch(task, epoch, train_loss, validated.loss, validated.metrics))
        tell(done[-1])
    return ArmRun(
        seed=seed, updates=updates, samples_seen=samples, seconds=seconds, peak_bytes=peak, epochs=tuple(done)
    )


def _arm_epoch(
    task: Task, epoch: int, train_loss: float | None, valid_loss: float | None, metrics: schema.Numbers
) -> ArmEpoch:
    value = loop.judging_number(task.metric, valid_loss, metrics)
    return ArmEpoch(epoch=epoch, train_loss=train_loss, valid_loss=valid_loss, metric=value)


def _learn(experiment: Experiment, micro_batches: Sequence[Batch]) -> tuple[float, float]:
    """Make one update; return the sum of the losses weighted by units, and the units."""
    task, update = experiment.task, experiment.update
    total = units = 0.0
    forward = ForwardPass(model=task.model, compute=task.whole_objective.loss, device=experiment.device)
    for micro_batch in micro_batches:
        on_device = forward.load(micro_batch)
        loss, _ = checked_loss(forward(on_device))
        (loss / len(micro_batches)).backward()
        counted = count_units(task.objective, task.model, [on_device])[0]
        weight = 1.0 if task.objective.reduction == "sum" else counted
        total, units = total + weight * float(loss.detach()), units + counted
    if update.clip_norm is not None:
        clip_grad_norm_(task.model.parameters(), update.clip_norm)
    task.optimizer.step()
    if update.scheduler is not None:
        update.scheduler.step()
    task.optimizer.zero_grad()
    return total, units


def _learn_measured(experiment: Experiment, micro_batches: Sequence[Batch]) -> tuple[float, float, int]:
    """Make one update under the profiler; return its losses, its units and its peak memory."""
    task = experiment.task
    drop_gradients(task.model.parameters())
    standing = bytes_of([*task.model.parameters(), *task.model.buffers(), *optimizer_tensors(task.optimizer)])
    (loss, units), points = profiled(lambda: _learn(experiment, micro_batches), standing)
    return loss, units, max((point.bytes for point in points), default=standing)


def show_spread(value: Spread, metric: str | None) -> str:
    """Write a metric as a percentage, a loss as it is, with its deviation if there is one.

    >>> show_spread(Spread(0.9712, 0.004), "accuracy"), show_spread(Spread(0.25, None), None)
    ('97.1 ± 0.4 %', '0.2500')
    """
    factor, digits, unit = (1, 4, "") if metric is None else (100, 1, " %")
    shown = [f"{factor * part:.{digits}f}" for part in (value.mean, value.deviation) if part is not None]
    return " ± ".join(shown) + unit if shown else "-"


def findings(arms: Sequence[Arm], metric: str | None, *, rows: int, num_batch_norms: int = 0) -> tuple[str, ...]:
    """Describe the four arms in sentences: small batch, usual loop, exact batch, exact batch with the rule."""
    small, usual, exact, scaled = arms
    judge = _Judge(metric)
    said = [
        _first_epoch(small, exact, judge),
        _rule(small, exact, scaled, judge),
        _at_the_end(small, exact, scaled, judge),
        _tail(usual, exact, rows, judge),
        _memory(small, exact),
        _time(small, exact),
    ]
    if num_batch_norms:
        said.append(
            f"The exact batch is not quite exact here: BatchNorm ({plural(num_batch_norms, 'layer')}) takes its statistics "
            f"from each micro-batch of {exact.micro_batch}, in all arms."
        )
    return tuple(sentence for sentence in said if sentence)


@dataclass(frozen=True, slots=True)
class _Judge:
    metric: str | None  # None: the validation loss, of which less is better

    def at(self, arm: Arm, epoch: int) -> Spread:
        """Return the arm's metric after an epoch; 0 is the last."""
        return at_epoch(arm, epoch, lambda point: point.metric)

    def show(self, arm: Arm, epoch: int) -> str:
        return show_spread(self.at(arm, epoch), self.metric)

    def order(self, first: Arm, second: Arm, epoch: int) -> int:
        """Return 1 if the first is clearly better, -1 if the second is, 0 if the seeds do not decide."""
        one, other = self.at(first, epoch), self.at(second, epoch)
        if one.mean is None or other.mean is None:
            return 0
        difference = one.mean - other.mean if self.metric is not None else other.mean - one.mean
        noise = math.hypot(one.deviation or 0.0, other.deviation or 0.0)
        return 0 if not abs(difference) > noise else (1 if difference > 0 else -1)


def _first_epoch(small: Arm, exact: Arm, judge: _Judge) -> str:
    shown = judge.show(exact, 1), judge.show(small, 1)
    per_epoch = [(arm.runs[0].updates or 0) // len(arm.runs[0].epochs) for arm in (exact, small)]
    counts = f"{per_epoch[0]} updates per epoch against {per_epoch[1]}"
    verdict = {
        -1: f"the larger batch learns more slowly per epoch: it makes {counts}",
        0: f"no clear difference between the two, though one makes {counts}",
        1: f"the larger batch is ahead, though it makes {counts}",
    }[judge.order(exact, small, 1)]
    caution = " (One seed: chance is not excluded.)" if len(exact.runs) == 1 else ""
    return (
        f"At the same learning rate, after epoch 1: {shown[0]} {judge.metric or 'validation loss'} with the exact batch of "
        f"{exact.batch} against {shown[1]} with batches of {small.batch}: {verdict}.{caution}"
    )


def _rule(small: Arm, exact: Arm, scaled: Arm, judge: _Judge) -> str:
    gain = {
        1: "better than without the rule",
        0: "not clearly different from without",
        -1: "worse than without the rule",
    }[judge.order(scaled, exact, 1)]
    level = {
        1: f"and ahead of batches of {small.batch}",
        0: f"and level with batches of {small.batch} ({judge.show(small, 1)})",
        -1: f"and still behind batches of {small.batch} ({judge.show(small, 1)})",
    }[judge.order(scaled, small, 1)]
    return (
        f"With the learning rate scaled from {exact.lr:.4g} to {scaled.lr:.4g}, the exact batch has "
        f"{judge.show(scaled, 1)} after epoch 1: {gain}, {level}."
    )


def _at_the_end(small: Arm, exact: Arm, scaled: Arm, judge: _Judge) -> str:
    arms = (small, exact, scaled)
    shown = ", ".join(f"{arm.name} {judge.show(arm, 0)}" for arm in arms)
    pairs = [(one, other) for one in arms for other in arms if judge.order(one, other, 0) > 0]
    word = "above" if judge.metric is not None else "better than"
    apart = ", ".join(f"{one.name} {word} {other.name}" for one, other in pairs)
    verdict = f"clearly apart are only these: {apart}" if pairs else "the seeds do not tell them apart"
    return f"After the last epoch, {len(exact.runs[0].epochs)}: {shown}; {verdict}."


def _tail(usual: Arm, exact: Arm, rows: int, judge: _Judge) -> str:
    dropped = rows - (usual.runs[0].samples_seen or 0) // len(usual.runs[0].epochs)
    updates = f"{usual.runs[0].updates} updates against {exact.runs[0].updates}"
    verdict = {
        1: "the exact batch ends clearly better",
        0: "the end result does not clearly differ",
        -1: "the usual loop ends clearly better here",
    }[judge.order(exact, usual, 0)]
    ends = f"{judge.show(usual, 0)} against {judge.show(exact, 0)}: {verdict}"
    if dropped == 0:
        return f"The usual loop sees every row here ({updates}), because the rows fill its windows; {ends}."
    return f"The usual loop leaves {dropped:,} of {rows:,} rows out in every epoch ({updates}); {ends}."


def _memory(small: Arm, exact: Arm) -> str:
    one, other = small.runs[0].peak_bytes, exact.runs[0].peak_bytes
    if not one or not other or not small.batch or not exact.batch:
        return ""
    return (
        f"Peak memory of an update: {show_bytes(other)} for the batch of {exact.batch} in micro-batches of "
        f"{exact.micro_batch}, {show_bytes(one)} for a batch of {small.batch}: {other / one:.2f} times, for a batch "
        f"{exact.batch / small.batch:g} times as large."
    )


def _time(small: Arm, exact: Arm) -> str:
    one, other = (over_runs(arm, lambda run: run.seconds).mean for arm in (small, exact))
    return f"Training took {other:.2f} s with the exact batch and {one:.2f} s with batches of {small.batch}, validation apart."

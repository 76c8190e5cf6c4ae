"""The experiment: small batches, the usual accumulation loop, the exact batch, the exact batch with the LR rule."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch

from anybatch.errors import SettingsError
from anybatch.lessons.findings import findings
from anybatch.lessons.usual_loop import run_usual_loop, usual_updates
from anybatch.records import Arm, ArmEpoch, ArmRun, Comparison, EpochDone, MemorySeen, Metric, UpdateDone
from anybatch.training import (
    ADAMS,
    Experiment,
    Loop,
    LRRule,
    Settings,
    Task,
    assemble,
    find_device,
    judging_number,
    make_plan,
    num_inexact_norms,
    seed_all,
)

Tell = Callable[["ArmPlan", int, ArmEpoch], None]
"""Told (arm, seed, epoch) after each epoch of each run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmPlan:
    """One way of training, before it has run."""

    name: str
    description: str
    settings: Settings
    epochs: int
    lr: float
    is_usual_loop: bool = False


def compare(build: Callable[[], Task], settings: Settings, *, num_seeds: int, tell: Tell) -> Comparison:
    """Every arm with every seed. A seed gives all arms the same first weights and the same order of rows."""
    if num_seeds < 1:
        raise SettingsError(f"--seeds {num_seeds}: expected 1 or more.")
    seed_all(settings.seed)
    task = build()
    arms = []
    for plan in arms_of(task, settings):
        runs = tuple(_run(build, plan, settings.seed + number, tell) for number in range(num_seeds))
        arms.append(
            Arm(
                name=plan.name,
                description=plan.description,
                batch=plan.settings.batch_size or task.batch_size,
                micro_batch=_rows(task, plan.settings),
                lr=plan.lr,
                runs=runs,
            )
        )
    return Comparison(
        metric=task.metric or "validation loss",
        arms=tuple(arms),
        findings=findings(tuple(arms), task.metric, rows=len(task.training), num_batch_norms=num_inexact_norms(task)),
    )


def arms_of(task: Task, settings: Settings) -> tuple[ArmPlan, ...]:
    """The four arms. The learning rate is taken to be chosen for the small batch; the rule starts from there."""
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
    usual_length = usual_updates(len(task.training), micro_batch, num_micro) * epochs
    if usual_length == 0:
        raise SettingsError(
            f"--batch-size {batch} in micro-batches of {micro_batch}: the usual loop would never step on "
            f"{len(task.training)} rows. Give a smaller batch."
        )
    device = find_device(settings.device)
    lrs = [make_plan(task, each, device).lr_peak for each in (small, whole, scaled)]
    return (
        ArmPlan(
            name="small batch",
            description=f"an update after every {micro_batch} rows",
            settings=small,
            epochs=epochs,
            lr=lrs[0],
        ),
        ArmPlan(
            name="usual loop",
            description=f"{num_micro} micro-batches of {micro_batch}, each loss divided by {num_micro}; the tail is dropped",
            settings=dataclasses.replace(whole, epochs=None, updates=usual_length),
            epochs=epochs,
            lr=lrs[1],
            is_usual_loop=True,
        ),
        ArmPlan(
            name="exact batch",
            description=f"the gradient of all {batch} rows, in micro-batches of {micro_batch}, the same learning rate",
            settings=whole,
            epochs=epochs,
            lr=lrs[1],
        ),
        ArmPlan(
            name="exact + rule",
            description=f"the same with the {rule} rule: learning rate {lrs[1]:.4g} -> {lrs[2]:.4g}",
            settings=scaled,
            epochs=epochs,
            lr=lrs[2],
        ),
    )


def _rows(task: Task, settings: Settings) -> int:
    if settings.micro_batch == "auto":
        raise SettingsError(
            "--micro-batch auto: the arms of a comparison need one number of rows, such as --micro-batch 16."
        )
    return settings.micro_batch or task.micro_batch


def _run(build: Callable[[], Task], plan: ArmPlan, seed: int, tell: Tell) -> ArmRun:
    experiment = assemble(build, dataclasses.replace(plan.settings, seed=seed))
    if plan.is_usual_loop:
        return run_usual_loop(experiment, epochs=plan.epochs, tell=lambda epoch: tell(plan, seed, epoch))
    return _run_exact(experiment, seed, lambda epoch: tell(plan, seed, epoch))


def _run_exact(experiment: Experiment, seed: int, tell: Callable[[ArmEpoch], None]) -> ArmRun:
    epochs: list[ArmEpoch] = []
    updates: list[UpdateDone] = []
    peaks: list[int] = []
    random_state = torch.get_rng_state().nbytes if experiment.device.type == "cpu" else 0

    def take(metric: Metric) -> None:
        if isinstance(metric, UpdateDone):
            updates.append(metric)
        elif isinstance(metric, MemorySeen):
            # a batch that may have to start again keeps torch's random state; nobody means that by memory
            peaks.append((metric.peak_bytes or 0) - random_state)
        elif isinstance(metric, EpochDone):
            value = judging_number(experiment.task.metric, metric.valid_loss, metric.metrics)
            losses = {"train_loss": metric.train_loss, "valid_loss": metric.valid_loss}
            epochs.append(ArmEpoch(epoch=metric.epoch, metric=value, **losses))
            tell(epochs[-1])

    Loop(experiment, tell=take).run()
    return ArmRun(
        seed=seed,
        updates=len(updates),
        samples_seen=sum(update.rows or 0 for update in updates),
        seconds=sum(update.seconds or 0.0 for update in updates),
        peak_bytes=max(peaks, default=None),
        epochs=tuple(epochs),
    )

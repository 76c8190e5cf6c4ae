"""Build a run from a task and settings: its plan and its `Update`."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.amp import GradScaler
from torch.optim.lr_scheduler import LambdaLR

from anybatch.app.training.learning_rates import BatchSchedule, beta2_of, rule_factor, scale_lr, schedule_of
from anybatch.app.training.ranks import ranks_of_group, seed_all, seed_rank, spread_over_ranks
from anybatch.app.training.settings import Decay, LRRule, Settings
from anybatch.app.training.tasks.task import Task
from anybatch.core import BatchNormLayer, Ranks, Rows, Split, Update
from anybatch.errors import SettingsError, TaskError
from anybatch.memory import Fit, fastest_fit
from anybatch.parallel import deal_rows
from anybatch.ragged import Tokens

NOISE_EVERY = 8  # updates between two measurements if the noise scale sets the batch size
CPU_SCALE = 2.0**12  # first loss scale of fp16 on the CPU; the usual 2**16 overflows small problems again and again


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """Numbers of a run, known before its first update; `run.json` has these fields in this order."""

    parameters: int
    rows: int
    validation_rows: int
    batch: int
    micro_batch: int | str  # rows, or the repr of the split
    micro_batches_per_update: int | None  # None if it varies from batch to batch
    updates_per_epoch: int
    updates: int
    epochs: int
    lr_first: float
    lr_peak: float
    lr_last: float
    lr_rule: LRRule
    base_batch: int
    beta2: float | None  # of Adam and its variants, after the rule
    warmup: int
    decay: Decay
    clip_norm: float | None
    precision: str
    device: str
    batch_norms: int  # BatchNorm layers that normalise each micro-batch separately
    batch_schedule: str | None = None  # growing batches in words; `batch` is the first
    ranks: int = 1
    parallel: str | None = None  # how the ranks hold the model; None for one process


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    task: Task
    settings: Settings
    plan: RunPlan
    update: Update
    device: torch.device
    schedule: BatchSchedule
    ranks: Ranks = field(default_factory=Ranks)


def assemble(build: Callable[[], Task], settings: Settings, *, group: Any = None) -> Experiment:
    """Seed, build the task, and make its update. The same settings make the same experiment, bit for bit.

    With a process `group` every rank calls this, and the model is spread over the ranks. They build the same task; later
    random numbers, such as dropout's, differ between ranks.
    """
    ranks = ranks_of_group(group)
    device = find_device(settings.device)
    seed_all(settings.seed)
    task = build()
    task.model.to(device)
    model = task.model if group is None else spread_over_ranks(task.model, task.optimizer, settings.parallel, group)
    plan = make_plan(task, settings, device, ranks=None if group is None else ranks)
    schedule = _schedule(task, settings)
    _set_lr(task, settings, plan)
    scaler = None
    if settings.precision == "fp16":
        scaler = GradScaler("cpu", init_scale=CPU_SCALE) if device.type == "cpu" else GradScaler(device.type)
    update = Update(
        model,
        task.optimizer,
        task.objective,
        micro_batch=find_split(task, settings, schedule.largest),
        batch_norm=task.batch_norm,
        clip_norm=plan.clip_norm,
        noise=settings.noise or (NOISE_EVERY if schedule.follows_noise else None),
        scheduler=LambdaLR(task.optimizer, schedule.lr_factor(plan.warmup, plan.updates, plan.decay, plan.lr_rule)),
        autocast={"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[settings.precision],
        scaler=scaler,
    )
    if ranks.rank:
        seed_rank(ranks.rank)
    return Experiment(
        task=task, settings=settings, plan=plan, update=update, device=device, schedule=schedule, ranks=ranks
    )


def make_plan(task: Task, settings: Settings, device: torch.device, *, ranks: Ranks | None = None) -> RunPlan:
    """Compute the numbers of a run, without changing the task."""
    rows = len(task.training)
    schedule = _schedule(task, settings)
    batch = schedule.batch(1)
    split = find_split(task, settings, schedule.largest)
    size = split.size if isinstance(split, Rows) else None
    parts = deal_rows(min(batch, rows), 1 if ranks is None else ranks.size)  # each rank cuts its own
    updates = settings.updates or schedule.updates_before((settings.epochs or task.epochs) + 1)
    if settings.warmup is None:
        num_warmup = min(task.warmup, updates // 10)  # a default must not fill a short run
    elif (num_warmup := settings.warmup) >= updates:
        raise SettingsError(f"--warmup {num_warmup}: the run has {updates} updates; expected fewer than that.")
    rule, decay = settings.lr_rule or task.lr_rule, settings.decay or task.decay
    base_batch = settings.base_batch or task.base_batch or task.batch_size
    times = batch / base_batch
    lr = settings.lr or float(task.optimizer.param_groups[0]["lr"])
    peak = lr * rule_factor(rule, times)
    factor = schedule.lr_factor(num_warmup, updates, decay, rule)
    beta2 = beta2_of(task.optimizer)
    if beta2 is not None and rule != "none" and settings.keep_half_life:
        beta2 = beta2**times
    return RunPlan(
        parameters=sum(parameter.numel() for parameter in task.model.parameters() if parameter.requires_grad),
        rows=rows,
        validation_rows=len(task.validation),
        batch=batch,
        micro_batch=repr(split) if size is None else size,
        micro_batches_per_update=None if size is None else sum(-(-len(part) // size) for part in parts),
        updates_per_epoch=schedule.updates_of(1),
        updates=updates,
        epochs=schedule.epoch_at(updates - 1),
        lr_first=peak * factor(0),
        lr_peak=peak * max(factor(0), factor(min(num_warmup, updates - 1))),
        lr_last=peak * factor(updates - 1),
        lr_rule=rule,
        base_batch=base_batch,
        beta2=beta2,
        warmup=num_warmup,
        decay=decay,
        clip_norm=settings.clip_norm or task.clip_norm,
        precision=settings.precision,
        device=str(device),
        batch_norms=num_inexact_norms(task),
        batch_schedule=schedule.describe(),
        ranks=len(parts),
        parallel=None if ranks is None else settings.parallel,
    )


def _schedule(task: Task, settings: Settings) -> BatchSchedule:
    given = None if settings.batch_size is not None else task.batch_schedule
    return schedule_of(given, batch=settings.batch_size or task.batch_size, rows=len(task.training))


def num_inexact_norms(task: Task) -> int:
    """Count the BatchNorm layers that use the statistics of each micro-batch alone."""
    if task.batch_norm is not None and task.batch_norm != "micro":
        return 0
    return sum(isinstance(module, BatchNormLayer) for module in task.model.modules())


def find_split(task: Task, settings: Settings, batch: int) -> Split:
    """Return the split of the settings, else the task's."""
    if settings.memory is not None or settings.micro_batch == "auto":
        of_task = task.split if isinstance(task.split, Rows | Tokens) else None
        most = settings.micro_batch if isinstance(settings.micro_batch, int) else of_task
        choose = fastest_fit if settings.micro_batch == "auto" else Fit
        return choose(settings.memory, most=most)
    if settings.micro_batch is None and task.split is not None:
        return task.split
    return Rows(min(settings.micro_batch or task.micro_batch, batch))


def find_device(name: str) -> torch.device:
    """Return the device of this name; `auto` is the accelerator if torch finds one."""
    if name == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise SettingsError(f"--device {name!r} cannot be used: {reason[:150]}. Use cpu, or auto.") from None
    if device.type == "meta":
        raise SettingsError("--device 'meta' holds no numbers, so nothing can be trained on it. Use cpu, or auto.")
    return device


def _set_lr(task: Task, settings: Settings, plan: RunPlan) -> None:
    groups = task.optimizer.param_groups
    if any("initial_lr" in group for group in groups):
        raise TaskError(
            "the task's optimizer already has a scheduler. Leave it out of task() and give Task(warmup=..., decay=...): the "
            "loop makes the scheduler, because it knows the number of updates."
        )
    if settings.lr is not None:
        first = float(groups[0]["lr"])
        for group in groups:  # groups keep their ratio to the first
            group["lr"] = settings.lr * (float(group["lr"]) / first if first else 1.0)
    scale_lr(
        task.optimizer,
        batch=plan.batch,
        base_batch=plan.base_batch,
        rule=plan.lr_rule,
        keep_half_life=settings.keep_half_life,
    )

"""The training loop: updates, validation after each epoch, checkpoints.

The loop hands a record of each event to `tell`, and prints and draws nothing itself. A run that was stopped or killed continues
from its last checkpoint and ends with the same weights, bit for bit; on a GPU, as far as its kernels are deterministic.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from math import isnan
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate
from torchdata.stateful_dataloader import StatefulDataLoader

from anybatch.app.records.schema import EpochDone, Metric, UpdateDone
from anybatch.app.training.checkpoints import PositionedLoader, save
from anybatch.app.training.experiment import Experiment
from anybatch.app.training.measure import with_memory, with_timeline
from anybatch.app.training.tasks.task import Task
from anybatch.core import (
    ONE_PROCESS,
    Batch,
    Dealt,
    ForwardPass,
    Metrics,
    Objective,
    Ranks,
    combine,
    count_units,
    loss_and_metrics,
    num_rows,
    on_host,
    shares_of,
    weighted_sum,
)
from anybatch.errors import AnybatchError, TaskError
from anybatch.parallel import GlobalBatches, reshard_all, unreplicated, wrapping_of

TIMELINE_AT = 2  # the update with a recorded timeline: the first one still warms up
MEMORY_AT = 3  # the update with a recorded memory curve: optimizer state and gradients exist by then
SECONDS_BETWEEN_SAVES = 60.0
Number = TypeVar("Number", float, float | None)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochSums:
    units: float = 0.0
    loss: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def plus(self, done: UpdateDone, *, is_sum: bool) -> "EpochSums":
        """Add an update with a mean or summed loss; a skipped one adds its time only."""
        seconds = self.seconds + (done.seconds or 0.0)
        if not done.applied:
            return replace(self, seconds=seconds)
        units, loss = done.units or 0.0, done.loss or 0.0
        return EpochSums(
            units=self.units + units,
            loss=self.loss + loss * (1.0 if is_sum else units),
            metrics={
                name: self.metrics.get(name, 0.0) + units * (value or 0.0) for name, value in done.metrics.items()
            },
            seconds=seconds,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """State of a run: what a checkpoint stores in addition to the update."""

    update: int = 0  # updates done
    epoch: int = 1  # of the next update
    sums: EpochSums = field(default_factory=EpochSums)
    best: float | None = None  # best validation metric so far; the lowest loss for a task without metric
    last: Mapping[str, Any] = field(default_factory=dict)  # record of the last epoch
    loader_state: dict[str, Any] | None = None
    batches: Mapping[int, int] = field(default_factory=dict)  # batch size by the first epoch that has it, so far

    def to_plain(self) -> dict[str, Any]:
        """Convert to plain values for a checkpoint, without the loader's state, which it stores itself."""
        values = asdict(replace(self, loader_state=None))
        del values["loader_state"]
        return values

    @staticmethod
    def from_plain(values: Mapping[str, Any], loader_state: dict[str, Any] | None) -> "Progress":
        known = {name: value for name, value in values.items() if name in Progress.__dataclass_fields__}
        return Progress(**{**known, "sums": EpochSums(**values["sums"]), "loader_state": loader_state})


@dataclass(frozen=True, slots=True)
class Validation:
    """Loss and metrics of the whole data, as if in one batch."""

    loss: float
    metrics: Mapping[str, float]


class Loop:
    """One run, from `progress` to the end of the plan or until `should_stop` returns True."""

    def __init__(
        self,
        experiment: Experiment,
        *,
        tell: Callable[[Metric], None],
        checkpoints: Path | None = None,
        progress: Progress | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        note: Callable[[str], None] = lambda _: None,
        before_save: Callable[[], None] = lambda: None,
    ) -> None:
        self.experiment = experiment
        self.progress = progress or Progress()
        self._tell = tell
        self._checkpoints = checkpoints
        self._should_stop = should_stop
        self._note = note
        self._before_save = before_save
        self._noted: set[str] = set()
        self._saved_at = -1 if progress is None else progress.update
        self._last_save = monotonic()
        experiment.schedule.steps.update(self.progress.batches)

    @property
    def is_finished(self) -> bool:
        plan, schedule = self.experiment.plan, self.experiment.schedule
        return self.progress.update >= min(plan.updates, schedule.updates_before(plan.epochs + 1))

    def run(self) -> Progress:
        """Train until the plan is done or `should_stop` returns True, and save a checkpoint at the end."""
        while not self.is_finished and not self.experiment.ranks.any(self._should_stop()):
            self._run_epoch()
        if self._saved_at != self.progress.update:
            self._save(None)
        return self.progress

    def _run_epoch(self) -> None:
        experiment, epoch, schedule = self.experiment, self.progress.epoch, self.experiment.schedule
        if self.progress.loader_state is None:
            noise = experiment.update.noise
            schedule.follow(epoch, None if noise is None else noise.scale)
        schedule.set_beta2(experiment.task.optimizer, epoch, experiment.plan.beta2)
        loader = dealt_loader(
            experiment.task,
            batch=schedule.batch(epoch),
            seed=experiment.settings.seed,
            epoch=epoch,
            ranks=experiment.ranks,
        )
        if self.progress.loader_state is not None:
            loader.load_state_dict(self.progress.loader_state)
        experiment.update.model.train()
        per_epoch = schedule.updates_of(epoch)
        left = schedule.updates_before(epoch + 1) - self.progress.update
        for batch in all_batches(loader, expected=per_epoch, data="training", done=per_epoch - left):
            self._learn(batch)
            left -= 1
            if left == 0 or self.is_finished:
                break
            # ranks decide together: their clocks and signals differ
            flags = experiment.ranks.gather([self._should_stop(), self._is_save_due()])
            is_stopping, is_save_due = (any(of_ranks) for of_ranks in zip(*flags, strict=True))
            if is_stopping or is_save_due:
                self._save(loader)
            if is_stopping:
                return
        self._close_epoch()

    def _learn(self, batch: Dealt) -> None:
        number = self.progress.update + 1
        update, last = self.experiment.update, self.experiment.plan.updates
        began = perf_counter()
        seen: Metric | None = None
        if number == min(TIMELINE_AT, last):
            result, seen = with_timeline(update, batch, number)
        elif number == min(MEMORY_AT, last):
            result, seen = with_memory(update, batch, number)
        else:
            result = update(batch)
        noise = result.noise_scale
        done = UpdateDone(
            update=number,
            epoch=self.progress.epoch,
            loss=float(result.loss),
            grad_norm=float(result.grad_norm),
            lr=float(result.lr),
            units=float(result.units),
            rows=batch.num_rows,
            micro_batches=result.micro_batches,
            applied=result.applied,
            metrics={name: float(value) for name, value in result.metrics.items()},
            seconds=perf_counter() - began,  # after the numbers above, which wait for the device
            retries=result.retries,
            noise_scale=None if noise is None else noise.rows,
            noise_low=None if noise is None else noise.low,
            noise_high=None if noise is None else noise.high,
        )
        self.progress = replace(
            self.progress,
            update=number,
            sums=self.progress.sums.plus(done, is_sum=self.experiment.task.objective.reduction == "sum"),
            loader_state=None,
            batches=self.experiment.schedule.steps,
        )
        self._check_rows(batch)
        if seen is not None:
            self._tell(seen)
        self._tell(done)

    def _close_epoch(self) -> None:
        progress, task, ranks = self.progress, self.experiment.task, self.experiment.ranks
        validated = validate(
            unreplicated(task.model),
            task.whole_objective,
            validation_batches(task, ranks),
            self.experiment.device,
            ranks=ranks,
            num_batches=-(-len(task.validation) // task.validation_batch),
        )
        sums = progress.sums
        units = sums.units or float("nan")
        if not sums.units:
            self._note_once(
                "units",
                f"epoch {progress.epoch} changed nothing: no update of it was applied. All its batches had 0 units, as where "
                "every target is ignored, or none of its gradients was finite.",
            )
        done = EpochDone(
            epoch=progress.epoch,
            update=progress.update,
            train_loss=sums.loss / units,
            valid_loss=validated.loss,
            metrics=validated.metrics,
            train_metrics={name: total / units for name, total in sums.metrics.items()},
            seconds=sums.seconds,
        )
        self.progress = Progress(
            update=progress.update,
            epoch=progress.epoch + 1,
            best=_better(task.metric, progress.best, validated),
            batches=progress.batches,
            last={name: getattr(done, name) for name in ("epoch", "train_loss", "valid_loss", "metrics")},
        )
        self._tell(done)
        if self._is_save_due(at_epoch_end=True):
            self._save(None)

    def _check_rows(self, batch: Dealt) -> None:
        """Note a collate that leaves rows out: updates, rows and epochs are counted by the dataset."""
        try:
            held = num_rows(batch.batch)
        except AnybatchError:
            return
        if not batch.is_stand_in and held != len(batch.row_numbers):
            self._note_once(
                "rows",
                f"the task's collate made {held} rows of {len(batch.row_numbers)}: updates learn from what it made, and rows "
                "are counted by the dataset.",
            )

    def _note_once(self, subject: str, text: str) -> None:
        if subject not in self._noted:
            self._noted.add(subject)
            self._note(text)

    def _is_save_due(self, *, at_epoch_end: bool = False) -> bool:
        every = self.experiment.settings.save_every
        if every is not None:
            return self.progress.update % every == 0
        return at_epoch_end or monotonic() - self._last_save > SECONDS_BETWEEN_SAVES

    def _save(self, loader: PositionedLoader | None) -> None:
        """Save a checkpoint; without a loader, its run continues with the first batch of the next epoch."""
        if self._checkpoints is None:
            return
        self._before_save()
        save(
            self._checkpoints,
            self.experiment.update,
            number=self.progress.update,
            loader=loader,
            progress=self.progress.to_plain(),
            keep=self.experiment.settings.keep,
        )
        self._saved_at = self.progress.update
        self._last_save = monotonic()


def judging_number(metric: str | None, valid_loss: Number, metrics: Mapping[str, Number]) -> Number:
    """Return the number that the task is judged by: its metric, or the validation loss."""
    if metric is not None and metric not in metrics:
        raise TaskError(
            f"the task is judged by {metric!r}, but its objective reports {', '.join(metrics) or 'no metrics'}. Give "
            "Task(metric=...) one of these, or None for the validation loss."
        )
    return valid_loss if metric is None else metrics[metric]


def _better(metric: str | None, best: float | None, validated: Validation) -> float:
    value = judging_number(metric, validated.loss, validated.metrics)
    if best is None or isnan(best):
        return value
    if isnan(value):
        return best
    return min(best, value) if metric is None else max(best, value)


def validate(
    model: nn.Module,
    objective: Objective,
    batches: Iterable[Batch],
    device: torch.device,
    *,
    ranks: Ranks = ONE_PROCESS,
    num_batches: int | None = None,
) -> Validation:
    """Evaluate without gradients in eval mode, then restore the mode.

    Batches are weighted by their units, as in training; a summed loss is returned per unit. Ranks take the batches in turn.
    Batches beyond the first `num_batches` run but do not count: a sharded model needs every rank in every forward.
    """
    was_training = model.training
    own: list[tuple[Tensor, Metrics, float]] = []
    forward = ForwardPass(model=model, compute=objective.loss, device=device)
    model.eval()
    try:
        with torch.no_grad():
            for batch in batches:
                there = forward.load(batch)
                loss, metrics = loss_and_metrics(forward(there))
                own.append((loss.reshape(()).float(), metrics, count_units(objective, model, [there])[0]))
    finally:
        reshard_all(wrapping_of(model).sharded)
        model.train(was_training)
    if ranks.size > 1:
        own = [(loss.cpu(), on_host(metrics), units) for loss, metrics, units in own]
    seen = [one for turn in zip(*ranks.gather_objects(own), strict=True) for one in turn][:num_batches]
    units = [one[2] for one in seen]
    is_sum = objective.reduction == "sum"
    counted = [(loss, units) for loss, _, units in seen if units > 0 or is_sum]
    weights = shares_of([units for _, units in counted], objective.reduction)
    total = float(weighted_sum([loss for loss, _ in counted], weights))
    return Validation(
        loss=total / (sum(units) or 1.0) if is_sum else total,
        metrics={name: float(value) for name, value in combine([one[1] for one in seen], units).items()},
    )


def all_batches(batches: Iterable[T], *, expected: int, data: str, done: int = 0) -> Iterator[T]:
    """Yield the batches of an epoch after the first `done`; raise if they end before there were `expected`.

    A dataset or a collate that raises StopIteration ends its loader as if the data had ended.
    """
    number = done
    for batch in batches:
        number += 1
        yield batch
    if number < expected:
        raise TaskError(
            f"the {data} data ended after {number} of {expected} batches. Its dataset, or its collate, raised StopIteration, "
            "which a loop takes for the end: let it raise another error, or say the true length in __len__."
        )


def first_batch(task: Task, *, batch: int, seed: int) -> Any:
    loader = training_loader(task, batch=batch, seed=seed, epoch=1)
    return next(all_batches(loader, expected=1, data="training"))


def training_loader(task: Task, *, batch: int, seed: int, epoch: int) -> "DataLoader[Any]":
    """Load all rows once, in the order of `dealt_loader`, which depends on seed and epoch alone."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    order = torch.randperm(len(task.training), generator=generator).tolist()
    return DataLoader(
        task.training, batch_size=batch, sampler=order, collate_fn=task.collate, generator=torch.Generator()
    )


def dealt_loader(
    task: Task, *, batch: int, seed: int, epoch: int, ranks: Ranks = ONE_PROCESS
) -> "StatefulDataLoader[Any]":
    """Load the batches of an epoch, each as a `Dealt` with this rank's rows.

    The position in the data is the same on every rank, and for any number of ranks.
    """
    batches = GlobalBatches(task.training, batch, rank=ranks.rank, ranks=ranks.size, seed=seed, lengths=task.lengths)
    batches.set_epoch(epoch)
    generator = torch.Generator()  # its own, because a loader draws a number when it starts
    collate = task.collate or default_collate
    with warnings.catch_warnings():
        # torchdata 0.11 calls a function that torch 2.13 has deprecated
        warnings.filterwarnings("ignore", message=".*set_vital.*is deprecated")
        loader: StatefulDataLoader[Any] = batches.loader(
            collate_fn=collate, loader=StatefulDataLoader, generator=generator
        )
    return loader


def validation_batches(task: Task, ranks: Ranks = ONE_PROCESS) -> Iterator[Any]:
    """Yield this rank's batches of the validation data: `validation_batch` rows each, in order, dealt to ranks in turn.

    All ranks have the same number of batches. A rank that would have one less ends with the first batch once more.
    """
    size, count = task.validation_batch, len(task.validation)
    starts = list(range(0, count, size))
    starts += [0] * (-len(starts) % ranks.size)
    rows = [list(range(start, min(start + size, count))) for start in starts[ranks.rank :: ranks.size]]
    loader = DataLoader(task.validation, batch_sampler=rows, collate_fn=task.collate, generator=torch.Generator())
    return all_batches(loader, expected=len(loader), data="validation")

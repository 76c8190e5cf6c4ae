"""The training loop: batches in, updates done, an epoch's validation, a checkpoint now and then.

The loop hands a record of each thing that happens to `tell`, and prints and draws nothing itself. A run that was stopped or
killed goes on from its last checkpoint, and ends with the same weights, bit for bit, as one that was not. On a GPU this holds
as far as its kernels are deterministic.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
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
    UpdateResult,
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

TIMELINE_AT = 2  # the update whose timeline is recorded: the first one still warms up
MEMORY_AT = 3  # the update whose memory is recorded: optimizer state and gradients are all there by then
SECONDS_BETWEEN_SAVES = 60.0
Number = TypeVar("Number", float, float | None)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochSums:
    """Sums over the updates of an epoch so far."""

    units: float = 0.0
    loss: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def plus(self, result: UpdateResult, seconds: float, *, is_sum: bool) -> "EpochSums":
        """With one more update, whose loss is a mean over its units, or a sum; one that was skipped counts its time only."""
        if not result.applied:
            return replace(self, seconds=self.seconds + seconds)
        units = float(result.units)
        metrics = {name: self.metrics.get(name, 0.0) + units * float(value) for name, value in result.metrics.items()}
        return EpochSums(
            units=self.units + units,
            loss=self.loss + float(result.loss) * (1.0 if is_sum else units),
            metrics=metrics,
            seconds=self.seconds + seconds,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run is: what a checkpoint holds besides the states of the update."""

    update: int = 0  # updates done
    epoch: int = 1  # of the next update
    sums: EpochSums = field(default_factory=EpochSums)
    best: float | None = None  # metric on the validation data so far; the lowest loss where there is no metric
    last: Mapping[str, Any] = field(default_factory=dict)  # the latest epoch's record
    loader_state: dict[str, Any] | None = None
    batches: Mapping[int, int] = field(default_factory=dict)  # rows of a batch by the first epoch that has them, so far

    def to_plain(self) -> dict[str, Any]:
        """As plain values, for a checkpoint, which keeps the loader's state in a place of its own."""
        values = asdict(replace(self, loader_state=None))
        del values["loader_state"]
        return values

    @staticmethod
    def from_plain(values: Mapping[str, Any], loader_state: dict[str, Any] | None) -> "Progress":
        """From a checkpoint; old ones have no `batches`."""
        known = {name: value for name, value in values.items() if name in Progress.__dataclass_fields__}
        return Progress(**{**known, "sums": EpochSums(**values["sums"]), "loader_state": loader_state})


@dataclass(frozen=True, slots=True)
class Validation:
    """The whole of the data, as if in one batch."""

    loss: float
    metrics: Mapping[str, float]


class Loop:
    """One run from where it is to where the plan ends, or `should_stop` says so."""

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
        """True when every update of the plan is done."""
        plan, schedule = self.experiment.plan, self.experiment.schedule
        return self.progress.update >= min(plan.updates, schedule.updates_before(plan.epochs + 1))

    def run(self) -> Progress:
        """Train until the plan is done or `should_stop` says so; the loop saves a checkpoint either way."""
        while not self.is_finished and not self._agree(self._should_stop())[0]:
            self._run_epoch()
        if self._saved_at != self.progress.update:
            self._save(None)
        return self.progress

    def _agree(self, *flags: bool) -> list[bool]:
        """For each flag, whether any rank has set it: clocks and signals differ between ranks, and decisions must not."""
        told = self.experiment.ranks.gather([float(flag) for flag in flags])
        return [any(of_ranks) for of_ranks in zip(*told, strict=True)]

    def _run_epoch(self) -> None:
        experiment, epoch = self.experiment, self.progress.epoch
        schedule = experiment.schedule
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
            is_stopping, is_save_due = self._agree(self._should_stop(), self._is_save_due())
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
        loss, grad_norm, lr = float(result.loss), float(result.grad_norm), float(result.lr)
        metrics = {name: float(value) for name, value in result.metrics.items()}
        seconds = perf_counter() - began
        is_sum = self.experiment.task.objective.reduction == "sum"
        self.progress = replace(
            self.progress,
            update=number,
            sums=self.progress.sums.plus(result, seconds, is_sum=is_sum),
            loader_state=None,
            batches=self.experiment.schedule.steps,
        )
        self._look_at_rows(batch)
        if seen is not None:
            self._tell(seen)
        noise = result.noise_scale
        self._tell(
            UpdateDone(
                update=number,
                epoch=self.progress.epoch,
                loss=loss,
                grad_norm=grad_norm,
                lr=lr,
                units=float(result.units),
                rows=batch.num_rows,
                micro_batches=result.micro_batches,
                applied=result.applied,
                seconds=seconds,
                metrics=metrics,
                retries=result.retries,
                noise_scale=None if noise is None else noise.rows,
                noise_low=None if noise is None else noise.low,
                noise_high=None if noise is None else noise.high,
            )
        )

    def _close_epoch(self) -> None:
        progress, task = self.progress, self.experiment.task
        validated = validate(
            unreplicated(task.model),
            task.whole_objective,
            validation_batches(task, self.experiment.ranks),
            self.experiment.device,
            ranks=self.experiment.ranks,
            num_batches=-(-len(task.validation) // task.validation_batch),
        )
        sums = progress.sums
        units = sums.units or float("nan")
        if not sums.units:
            self._say_once(
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

    def _look_at_rows(self, batch: Dealt) -> None:
        """Say where a collate leaves rows out: updates, rows seen and epochs are counted by the dataset's."""
        try:
            held = num_rows(batch.batch)
        except AnybatchError:
            return
        if not batch.is_stand_in and held != len(batch.row_numbers):
            self._say_once(
                "rows",
                f"the task's collate made {held} rows of {len(batch.row_numbers)}: updates learn from what it made, and rows "
                "are counted by the dataset.",
            )

    def _say_once(self, subject: str, text: str) -> None:
        if subject not in self._noted:
            self._noted.add(subject)
            self._note(text)

    def _is_save_due(self, *, at_epoch_end: bool = False) -> bool:
        every = self.experiment.settings.save_every
        if every is not None:
            return self.progress.update % every == 0
        return at_epoch_end or monotonic() - self._last_save > SECONDS_BETWEEN_SAVES

    def _save(self, loader: PositionedLoader | None) -> None:
        """Save at this update boundary; without a loader, the next epoch begins afresh."""
        if self._checkpoints is None:
            return
        settings, progress = self.experiment.settings, self.progress
        self._before_save()
        save(
            self._checkpoints,
            self.experiment.update,
            number=progress.update,
            loader=loader,
            progress=progress.to_plain(),
            keep=settings.keep,
        )
        self._saved_at = progress.update
        self._last_save = monotonic()


def judging_number(metric: str | None, valid_loss: Number, metrics: Mapping[str, Number]) -> Number:
    """The number that the task is judged by."""
    if metric is not None and metric not in metrics:
        raise TaskError(
            f"the task is judged by {metric!r}, but its objective reports {', '.join(metrics) or 'no metrics'}. Give "
            "Task(metric=...) one of these, or None for the validation loss."
        )
    return valid_loss if metric is None else metrics[metric]


def _better(metric: str | None, best: float | None, validated: Validation) -> float:
    value = judging_number(metric, validated.loss, validated.metrics)
    if best is None or isnan(best) or isnan(value):
        return value if best is None or isnan(best) else best
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
    """Evaluate without gradients, in eval mode; the mode is put back.

    Units weigh the batches, as in training; a loss that is a sum is given per unit. Ranks take the batches in turn. Batches
    beyond the first `num_batches` run, because a sharded model needs every rank in every forward, but do not count.
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
    """The batches of an epoch, of which `done` were there before; an error where they end before there were `expected`.

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
    """The first batch of the training data."""
    loader = training_loader(task, batch=batch, seed=seed, epoch=1)
    return next(all_batches(loader, expected=1, data="training"))


def training_loader(task: Task, *, batch: int, seed: int, epoch: int) -> "StatefulDataLoader[Any]":
    """All rows once, shuffled; the order is a function of seed and epoch alone, and no other random state is drawn from."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    with _without_deprecations():
        return StatefulDataLoader(
            task.training, batch_size=batch, shuffle=True, generator=generator, collate_fn=task.collate
        )


def dealt_loader(
    task: Task, *, batch: int, seed: int, epoch: int, ranks: Ranks = ONE_PROCESS
) -> "StatefulDataLoader[Any]":
    """The batches of `training_loader`; each is a `Dealt` with the rows that are dealt to this rank.

    Where it is in the data is the same on every rank, and for any number of them.
    """
    batches = GlobalBatches(task.training, batch, rank=ranks.rank, ranks=ranks.size, seed=seed, lengths=task.lengths)
    batches.set_epoch(epoch)
    generator = torch.Generator()  # its own, because a loader draws a number when it starts
    with _without_deprecations():
        loader: StatefulDataLoader[Any] = batches.loader(
            collate_fn=task.collate or default_collate, loader=StatefulDataLoader, generator=generator
        )
    return loader


def validation_loader(task: Task, ranks: Ranks = ONE_PROCESS) -> "DataLoader[Any]":
    """Every rank's batches of the validation data, whole and in turn: `validation_batch` rows as they lie, from rank 0 on.

    All ranks have the same number of batches. A rank that would have one less ends with the first batch once more.
    """
    size, count = task.validation_batch, len(task.validation)
    starts = list(range(0, count, size))
    starts += [0] * (-len(starts) % ranks.size)
    rows = [list(range(start, min(start + size, count))) for start in starts[ranks.rank :: ranks.size]]
    return DataLoader(task.validation, batch_sampler=rows, collate_fn=task.collate, generator=torch.Generator())


def validation_batches(task: Task, ranks: Ranks = ONE_PROCESS) -> Iterator[Any]:
    """The batches of `validation_loader`, all of them."""
    loader = validation_loader(task, ranks)
    return all_batches(loader, expected=len(loader), data="validation")


@contextmanager
def _without_deprecations() -> Iterator[None]:
    with warnings.catch_warnings():
        # torchdata 0.11 calls a function that torch 2.13 has deprecated
        warnings.filterwarnings("ignore", message=".*set_vital.*is deprecated")
        yield

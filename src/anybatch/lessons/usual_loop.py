"""The accumulation loop as it is usually written, kept as the thing to compare with. Not for training.

Micro-batches come from the loader, each loss is divided by their planned number, and the optimizer steps when that number is
reached. Micro-batches that are left over at the end of an epoch never lead to a step. A shorter micro-batch weighs as much as a
full one.
"""

from collections.abc import Callable, Sequence
from time import perf_counter

from torch.nn.utils import clip_grad_norm_

from anybatch.batches import Batch, num_rows, windows
from anybatch.memory import bytes_of, drop_gradients, optimizer_tensors
from anybatch.objectives import checked_loss, count_units
from anybatch.passes import ForwardPass
from anybatch.records import ArmEpoch, ArmRun
from anybatch.training import (
    MEMORY_AT,
    Experiment,
    all_batches,
    judging_number,
    profiled,
    training_loader,
    validate,
    validation_batches,
)


def usual_updates(rows: int, micro_batch: int, accumulate: int) -> int:
    """Updates per epoch, which only whole windows make.

    >>> usual_updates(1000, 16, 4)
    15
    """
    return -(-rows // micro_batch) // accumulate


def run_usual_loop(experiment: Experiment, *, epochs: int, tell: Callable[[ArmEpoch], None]) -> ArmRun:
    """Train for this number of epochs the usual way."""
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
        loader = training_loader(task, batch=micro_batch, seed=seed, epoch=epoch)
        for window in windows(all_batches(loader, expected=len(loader), data="training"), accumulate):
            if len(window) < accumulate:
                break  # its gradients wait for a step that does not come
            if updates + 1 == MEMORY_AT and experiment.device.type == "cpu":
                loss, units, peak = _measured_window(experiment, window.micro_batches)
            else:
                loss, units = _learn(experiment, window.micro_batches)
            updates += 1
            samples += sum(num_rows(micro_batch) for micro_batch in window)
            total_loss, total_units = total_loss + loss, total_units + units
        seconds += perf_counter() - began
        validated = validate(task.model, task.whole_objective, validation_batches(task), experiment.device)
        done.append(
            ArmEpoch(
                epoch=epoch,
                train_loss=total_loss / total_units if total_units else float("nan"),
                valid_loss=validated.loss,
                metric=judging_number(task.metric, validated.loss, validated.metrics),
            )
        )
        tell(done[-1])
    return ArmRun(
        seed=seed, updates=updates, samples_seen=samples, seconds=seconds, peak_bytes=peak, epochs=tuple(done)
    )


def _learn(experiment: Experiment, micro_batches: Sequence[Batch]) -> tuple[float, float]:
    """One window: the sum of unit-weighted losses, and the units."""
    task, update = experiment.task, experiment.update
    total = units = 0.0
    forward = ForwardPass(model=task.model, compute=task.whole_objective.loss, device=experiment.device)
    for micro_batch in micro_batches:
        there = forward.load(micro_batch)
        loss, _ = checked_loss(forward(there))
        (loss / len(micro_batches)).backward()
        counted = count_units(task.objective, task.model, [there])[0]
        weight = 1.0 if task.objective.reduction == "sum" else counted
        total, units = total + weight * float(loss.detach()), units + counted
    if update.clip_norm is not None:
        clip_grad_norm_(task.model.parameters(), update.clip_norm)
    task.optimizer.step()
    if update.scheduler is not None:
        update.scheduler.step()
    task.optimizer.zero_grad()
    return total, units


def _measured_window(experiment: Experiment, micro_batches: Sequence[Batch]) -> tuple[float, float, int]:
    task = experiment.task
    drop_gradients(task.model.parameters())
    standing = bytes_of([*task.model.parameters(), *task.model.buffers(), *optimizer_tensors(task.optimizer)])
    (loss, units), points = profiled(lambda: _learn(experiment, micro_batches), standing)
    return loss, units, max((point.bytes for point in points), default=standing)

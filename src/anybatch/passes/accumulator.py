"""The accumulator: a batch in, its exact gradient in `.grad`."""

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from anybatch.batches import (
    AsGiven,
    Batch,
    Dealt,
    MicroBatch,
    MicroBatches,
    Split,
    Workload,
    as_split,
    smaller,
    tensors,
)
from anybatch.dropout import count_update, number_rows
from anybatch.errors import MemoryLimitError, ParallelError
from anybatch.events import Accumulate, Backward, Observer, Retry, Tracker, tracker_for
from anybatch.gradients import GradientSum, Shares, shares_of
from anybatch.objectives import Coupled, Objective, count_units
from anybatch.parallel import engine_for
from anybatch.passes.accumulated import Accumulated, Done, result_together
from anybatch.passes.agreement import Agreed, agree, has_rows, size_of
from anybatch.passes.barrier import Meeting
from anybatch.passes.checks import check_parts, check_sharded
from anybatch.passes.norm_policy import BatchNorm, NormPolicy
from anybatch.passes.timing import stopwatch_for
from anybatch.passes.work import Autocast, Work, autocast_context, common_device, passes_fp16
from anybatch.state import Offload, Rewind, copy_statistics, once_more, tracking_layers, until_it_fits


class Accumulator:
    """Gradients of whole batches from micro-batches that fit.

    `parameters()` gives those whose gradients are kept apart, summed in fp32 and put back after an error: the model's by
    default; name here whatever else the optimizer steps, such as the parameters of a criterion. With `drop_nonfinite`, a
    micro-batch whose loss or gradient is inf or nan is left out and the rest renormalised; this needs a second set of
    gradients and waits for the device after each micro-batch. With `keep_fp32`, gradients of bf16 and fp16 parameters stay
    fp32 after the sum, for optimizers that take them so.

    `batch_norm` says what BatchNorm layers in training see: `"exact"`, the whole batch, with gradients through its statistics;
    `"micro"`, each micro-batch for itself, running statistics merged to one update; `"frozen"`, the running statistics. None
    is `"micro"` with one warning that says how far off the first gradient was. In `"exact"` all micro-batches' graphs live at
    once; `offload` says where what they save is kept: `"host"` memory, for accelerators, `"disk"`, None for where it is, or
    `"auto"`: in place up to half of the free memory, then out, to the host from an accelerator, to disk from the CPU.

    A model in `DistributedDataParallel` or sharded by `fully_shard` is given as it is: the batch is then what all ranks give
    together, each its own rows, None where it has none. Gradients are synchronised once, in the last backward pass; loss,
    units and metrics are the whole batch's, on every rank. With `reshard=False`, FSDP2 keeps parameters gathered from one
    micro-batch to the next: fewer all-gathers for more memory.

    Where memory runs out, the batch starts again in micro-batches of half the size, from the same random state and buffers;
    `split` is then what the next batches are cut by.

    >>> model = nn.Linear(3, 1)
    >>> accumulator = Accumulator(model, Objective(lambda model, x: model(x).square().mean()), micro_batch=4)
    >>> accumulator.backward(torch.randn(10, 3)).micro_batches
    3
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective | Coupled,
        *,
        micro_batch: MicroBatch,
        autocast: Autocast = None,
        batch_norm: BatchNorm | None = None,
        offload: Offload = "auto",
        parameters: Callable[[], Iterable[nn.Parameter]] | None = None,
        drop_nonfinite: bool = False,
        keep_fp32: bool = False,
        reshard: bool = True,
        observer: Observer | None = None,
    ) -> None:
        check_parts(model, objective, autocast)
        self.engine = engine_for(model, reshard=reshard)
        self.model = model
        self.objective = objective
        self.split = as_split(micro_batch)
        self.autocast = autocast
        self.norms = NormPolicy(model, batch_norm, offload)
        if self.engine.is_even:
            check_sharded(drop_nonfinite)
        if drop_nonfinite and self.engine.ranks.size > 1 and (isinstance(objective, Coupled) or batch_norm == "exact"):
            raise ParallelError(
                f"on {self.engine.ranks.size} ranks, micro-batches whose rows look at each other are not left out one by one. "
                "Use on_nonfinite='skip', which leaves the update out."
            )
        self.drop_nonfinite = drop_nonfinite
        self.keep_fp32 = keep_fp32
        self.observer = observer
        self.parameters = model.parameters if parameters is None else parameters
        own_loss = objective.loss if isinstance(objective, Coupled) else None
        self._rewind = Rewind([model, own_loss] if isinstance(own_loss, nn.Module) else [model])
        self._given: Split = AsGiven()
        self._proven = 0
        self.workload = Workload(
            model=model,
            objective=objective,
            options={"autocast": autocast, "batch_norm": batch_norm, "offload": offload},
        )

    def backward(self, batch: Batch, *, scaler: GradScaler | None = None) -> Accumulated:
        """Add to `.grad` what one backward pass over the whole batch would add.

            grad += sum_k (units_k / units) * d loss(micro_batch_k)

        Exact up to summation order when rows do not look at each other. Gradients are neither zeroed, clipped nor
        stepped here. Micro-batches are moved to the model's device one at a time. With a `scaler`, gradients come out
        scaled: unscale them before clipping. A batch of 0 units leaves zero gradients. An exception leaves `.grad` as it
        was before the call.
        """
        count_update(self.model)
        tracker = tracker_for(self.observer)
        start = once_more(self._rewind.start)
        work: Work | None = None

        def attempt() -> Accumulated:
            nonlocal work
            work = None
            work = self.prepare(batch, scaler, tracker)
            result = self._run(batch, work, scaler)
            if work.agreed is not None:
                self._proven = max(self._proven, *map(size_of, work.micro_batches))
            return result

        def start_again(reason: str) -> None:
            lost = self._rewind.go_back(start)
            if self.engine.ranks.any(bool(lost)):
                raise MemoryLimitError(
                    f"memory ran out ({reason}), and this batch cannot start again: it was the first to change "
                    f"{', '.join(lost)}, of which there is no copy. Give the next batch: from now on copies are made."
                )
            self._shrink(batch, work, reason)
            if tracker is not None:
                tracker.begin(Retry)
                tracker.end(Retry, reason=reason)

        if self.engine.ranks.size > 1 and (self.engine.is_even or self.norms.mode == "exact"):
            # a rank that fails amid collectives cannot tell the others, and starts nothing again alone
            return attempt()
        result, retries = until_it_fits(attempt, start_again)
        return replace(result, retries=retries) if retries else result

    def _shrink(self, batch: Batch, work: Work | None, reason: str) -> None:
        """Cut in smaller micro-batches from now on; those that come cut already, too."""
        is_given = isinstance(batch.batch if isinstance(batch, Dealt) else batch, MicroBatches)
        found = None if work is None else smaller(self._given if is_given else self.split, work.cut)
        if not self.engine.ranks.any(found is not None):
            where = "before the first micro-batch ran" if work is None else "with a single row in each micro-batch"
            need = getattr(self.split, "need", None)
            predicted = "" if need is None else f" An update with one row needs {need}, as predicted."
            raise MemoryLimitError(
                f"memory ran out {where} ({reason}).{predicted} Gradients, buffers and random state are as they were. Use "
                "shorter rows, autocast=torch.bfloat16, torch.utils.checkpoint inside the model, or a smaller model."
            )
        if found is None:
            return  # other ranks can make theirs smaller
        if is_given:
            self._given = found
        else:
            self.split = found

    def _run(self, batch: Batch, work: Work, scaler: GradScaler | None) -> Accumulated:
        tracker = work.tracker
        if isinstance(self.objective, Coupled) or self.norms.is_exact(work):
            return self._backward_together(work, scaler)
        drops = self.drop_nonfinite and not work.shares.is_empty
        isolate = drops and scaler is None  # an overflow of the scaled gradient is the scaler's to see
        layers = tracking_layers(self.model) if drops else []
        done = Done()
        try:
            with (
                self._gradient_sum(work, isolate=isolate) as gradient_sum,
                self.norms.around(work, gradient_sum, scaler) as work,
            ):
                starts: tuple[Tensor, ...] = ()
                watch = stopwatch_for(self.split, batch, work.cut, work.parameters)
                passes = work.passes
                for place, (index, counts) in enumerate(passes, start=1):
                    is_last = place == len(passes)
                    if is_last and work.turn.is_synchronised:
                        work.meeting.hold(is_final=True)
                    with work.turn.running(is_last=is_last):
                        statistics = copy_statistics(layers)
                        loss, metrics = work.forward(index)
                        starts = starts or work.shares.tensors(loss, scaler)
                        is_kept = not drops or bool(loss.isfinite())
                        if is_kept:
                            start = starts[index] if counts else torch.zeros_like(starts[index])
                            is_kept = _backward(gradient_sum, loss, start, index, tracker)
                        if not is_kept:
                            statistics.restore()
                        if not is_kept or not counts:
                            work.forget()
                    if watch is not None and counts:
                        watch.lap(index)
                    if counts:
                        done.add(index, loss.detach(), metrics, is_kept=is_kept)
                    has_metrics = bool(metrics)
                    del loss, metrics  # the next forward must not find this graph alive
                work.meeting.hold(is_final=True)
                work.turn.close(gradient_sum.parameters)
                if done.has_metrics or has_metrics:
                    done.unweighted.update((index, work.metrics_of(index)) for index in work.shares.left_out)
                result = done.result(work, starts[0].dtype)
                gradient_sum.scale = work.shares.left_over(result.units)
                if work.shares.is_empty:
                    gradient_sum.zero()
        except BaseException as error:
            work.turn.forget()
            if isinstance(error, Exception):
                work.meeting.fail(error)
            raise
        finally:
            if tracker is not None:
                tracker.close()
        if watch is not None:
            watch.finish()
        return result

    def _backward_together(self, work: Work, scaler: GradScaler | None) -> Accumulated:
        """`backward` of a batch whose rows look at each other."""
        drops = self.drop_nonfinite and not work.shares.is_empty
        isolate = drops and scaler is None
        try:
            with self._gradient_sum(work, isolate=isolate) as gradient_sum:
                coupled = self.objective if isinstance(self.objective, Coupled) else None
                together = self.norms.run_together(work, gradient_sum, coupled=coupled, scaler=scaler, drops=drops)
                work.meeting.hold(is_final=True)
                work.turn.close(gradient_sum.parameters)
                result = result_together(together, work)
                if together.counted is not None:
                    gradient_sum.scale = work.shares.left_over(result.units)
                if work.shares.is_empty:
                    gradient_sum.zero()
        except BaseException as error:
            work.turn.forget()
            if isinstance(error, Exception):
                work.meeting.fail(error)
            raise
        finally:
            if work.tracker is not None:
                work.tracker.close()
        return result

    def prepare(self, batch: Batch, scaler: GradScaler | None = None, tracker: Tracker | None = None) -> Work:
        """Cut the batch and count its units: all that comes before the first forward."""
        parameters = list(self.parameters())
        device = common_device(parameters)
        if isinstance(self.objective, Coupled):
            device = common_device(self.model.parameters())  # a loss's own parameters may lie elsewhere
            parameters += self.objective.parameters()
        autocast = autocast_context(self.autocast, device)
        underflows = scaler is None and passes_fp16(parameters, autocast)
        cut, shares, agreed = self._count(batch, underflows=underflows)
        turn = self.engine.turn(by_hand=self._by_hand(), is_proven=agreed is None or agreed.is_proven)
        if agreed is not None:
            shares = replace(shares, factor=turn.factor)
        is_there = device is None or all(tensor.device == device for tensor in tensors(cut.micro_batches[0]))
        return Work(
            self.model,
            self.objective.whole() if isinstance(self.objective, Coupled) else self.objective,
            cut,
            shares,
            parameters,
            None if is_there else device,
            autocast,
            tracker,
            turn,
            self.engine.ranks,
            agreed,
            Meeting(self.engine.ranks, is_over=agreed is None or self.engine.is_even or self.norms.mode == "exact"),
            rows=number_rows(self.model, cut, batch, self.engine.ranks),
        )

    def _count(self, batch: Batch, *, underflows: bool) -> tuple[MicroBatches, Shares, Agreed | None]:
        """The micro-batches, and the share of each in the batch of all ranks."""
        reduction = self.objective.reduction
        ranks = self.engine.ranks
        is_stand_in = isinstance(batch, Dealt) and batch.is_stand_in
        if isinstance(batch, Dealt):
            batch = None if is_stand_in and ranks.size > 1 else batch.batch

        def count() -> tuple[MicroBatches, Shares]:
            split = self._given if isinstance(batch, MicroBatches) else self.split
            choose_for = getattr(split, "choose_for", None)
            if choose_for is not None:
                choose_for(self.workload, batch)
            cut = split.cut(batch)
            units = count_units(self.objective, self.model, cut.micro_batches)
            if is_stand_in:  # a mean over nothing: zero gradients, of a sum too
                return cut, shares_of([0] * len(units), "mean", underflows=underflows)
            return cut, shares_of(units, reduction, underflows=underflows)

        if ranks.size == 1:
            return *once_more(count), None
        return agree(
            ranks,
            (lambda: once_more(count)) if has_rows(batch) else (lambda: (None, shares_of((), reduction))),
            is_even=self.engine.is_even,
            is_proven=self._is_proven,
            underflows=underflows,
            reduction=reduction,
            runs_all=isinstance(self.objective, Coupled),
        )

    def _is_proven(self, cut: MicroBatches, shares: Shares) -> bool:
        """True where the pass that would be synchronised is no larger than one before it, in this batch or an earlier one."""
        *earlier, last = [size_of(cut[index]) for index in shares.running]
        return last <= max([self._proven, *earlier])

    def _by_hand(self) -> str | None:
        """Why gradients of this batch cannot be summed over ranks while backward runs; None where they can."""
        if isinstance(self.objective, Coupled):
            return "the gradient of a coupled loss"
        if self.norms.mode == "exact":
            return "the gradient of batch_norm='exact'"
        return "dropping micro-batches that are not finite" if self.drop_nonfinite else None

    def _gradient_sum(self, work: Work, *, isolate: bool) -> GradientSum:
        return GradientSum(work.parameters, keep_fp32=self.keep_fp32, isolate=isolate, copies=self.engine.overwrites)


def _backward(gradient_sum: GradientSum, loss: Tensor, start: Tensor, index: int, tracker: Tracker | None) -> bool:
    if tracker is None:
        return gradient_sum.backward(loss, start)
    tracker.begin(Backward)
    is_finite = gradient_sum.backward(loss, start)
    tracker.end(Backward, micro_batch=index)
    tracker.begin(Accumulate)
    tracker.end(Accumulate, micro_batch=index, parameters=tuple(gradient_sum.parameters))
    return is_finite

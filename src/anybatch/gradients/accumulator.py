"""The accumulator: a batch in, its exact gradient in `.grad`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from anybatch.batches import Batch, Cut, Dealt, MicroBatch, MicroBatches, as_split, tensors
from anybatch.errors import LossError, UpdateError
from anybatch.gradients.coupled import Coupled, Together
from anybatch.gradients.metrics import Metrics, combine, detached
from anybatch.gradients.norm_policy import BatchNorm, NormPolicy
from anybatch.gradients.objective import Objective, count_units
from anybatch.gradients.offload import Offload
from anybatch.gradients.shares import Shares, shares_of, weighted_sum
from anybatch.gradients.statistics import copy_statistics, tracking_layers
from anybatch.gradients.summing import GradientSum
from anybatch.gradients.timing import stopwatch_for
from anybatch.gradients.work import Autocast, Work, autocast_context, common_device, passes_fp16
from anybatch.stages import Accumulate, Backward, Observer, Tracker, tracker_for


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulated:
    """What one batch left behind, beside its gradient. Reading a tensor waits for the device; nothing else does."""

    loss: Tensor
    """The loss of the whole batch, detached."""
    units: float
    """What the mean loss divided by: rows, target tokens, summed class weights."""
    micro_batches: int
    """How many micro-batches the batch was cut into."""
    metrics: Mapping[str, Tensor]
    """The objective's metrics, for the whole batch."""
    dropped: tuple[int, ...] = ()
    """Numbers of the micro-batches that were not finite and left out."""

    @property
    def has_gradient(self) -> bool:
        """False only where every micro-batch that counts was dropped."""
        return not self.dropped or self.units > 0


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
        observer: Observer | None = None,
    ) -> None:
        _check(model, objective, autocast)
        self.model = model
        self.objective = objective
        self.split = as_split(micro_batch)
        self.autocast = autocast
        self.norms = NormPolicy(model, batch_norm, offload)
        self.drop_nonfinite = drop_nonfinite
        self.keep_fp32 = keep_fp32
        self.observer = observer
        self.parameters = model.parameters if parameters is None else parameters

    def backward(self, batch: Batch, *, scaler: GradScaler | None = None) -> Accumulated:
        """Add to `.grad` what one backward pass over the whole batch would add.

            grad += sum_k (units_k / units) * d loss(micro_batch_k)

        Exact up to summation order when rows do not look at each other. Gradients are neither zeroed, clipped nor
        stepped here. Micro-batches are moved to the model's device one at a time. With a `scaler`, gradients come out
        scaled: unscale them before clipping. A batch of 0 units leaves zero gradients. An exception leaves `.grad` as it
        was before the call.
        """
        tracker = tracker_for(self.observer)
        work = self.prepare(batch, scaler, tracker)
        if isinstance(self.objective, Coupled) or self.norms.is_exact(work):
            return self._backward_together(work, scaler)
        drops = self.drop_nonfinite and not work.shares.is_empty
        isolate = drops and scaler is None  # an overflow of the scaled gradient is the scaler's to see
        layers = tracking_layers(self.model) if drops else []
        done = _Done()
        try:
            with (
                GradientSum(work.parameters, keep_fp32=self.keep_fp32, isolate=isolate) as gradient_sum,
                self.norms.around(work, gradient_sum, scaler) as work,
            ):
                starts: tuple[Tensor, ...] = ()
                watch = stopwatch_for(self.split, batch, work.cut, work.parameters)
                for index in work.shares.running:
                    statistics = copy_statistics(layers)
                    loss, metrics = work.forward(index)
                    starts = starts or work.shares.tensors(loss, scaler)
                    is_kept = not drops or bool(loss.isfinite())
                    if is_kept:
                        is_kept = _backward(gradient_sum, loss, starts[index], index, tracker)
                    if not is_kept:
                        statistics.restore()
                        work.forget()
                    if watch is not None:
                        watch.lap(index)
                    done.add(index, loss.detach(), metrics, is_kept=is_kept)
                    del loss, metrics  # the next forward must not find this graph alive
                gradient_sum.scale = work.shares.left_over(done.kept)
                if work.shares.is_empty:
                    gradient_sum.zero()
                if done.has_metrics:
                    done.unweighted.update((index, work.metrics_of(index)) for index in work.shares.left_out)
                result = done.result(work.shares, work.cut)
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
            with GradientSum(work.parameters, keep_fp32=self.keep_fp32, isolate=isolate) as gradient_sum:
                coupled = self.objective if isinstance(self.objective, Coupled) else None
                together = self.norms.run_together(work, gradient_sum, coupled=coupled, scaler=scaler, drops=drops)
                if together.counted is not None:
                    gradient_sum.scale = work.shares.left_over(together.counted)
                if work.shares.is_empty:
                    gradient_sum.zero()
                result = _result_together(together, work)
        finally:
            if work.tracker is not None:
                work.tracker.close()
        return result

    def prepare(self, batch: Batch, scaler: GradScaler | None = None, tracker: Tracker | None = None) -> Work:
        """Cut the batch and count its units: all that comes before the first forward."""
        dealt = batch if isinstance(batch, Dealt) else None
        batch = batch if dealt is None else dealt.batch
        cut = batch if isinstance(batch, MicroBatches) else self.split.cut(batch)
        units = count_units(self.objective, self.model, cut.micro_batches)
        reduction = self.objective.reduction
        if dealt is not None and dealt.is_stand_in:
            units, reduction = [0] * len(units), "mean"  # a mean over nothing: zero gradients, of a sum too
        parameters = list(self.parameters())
        device = common_device(parameters)
        if isinstance(self.objective, Coupled):
            device = common_device(self.model.parameters())  # a loss's own parameters may lie elsewhere
            parameters += self.objective.parameters()
        is_there = device is None or all(tensor.device == device for tensor in tensors(cut.micro_batches[0]))
        autocast = autocast_context(self.autocast, device)
        underflows = scaler is None and passes_fp16(parameters, autocast)
        shares = shares_of(units, reduction, underflows=underflows)
        return Work(
            self.model,
            self.objective.whole() if isinstance(self.objective, Coupled) else self.objective,
            cut,
            shares,
            parameters,
            None if is_there else device,
            autocast,
            tracker,
        )


def check_model(model: nn.Module) -> None:
    """Refuse what is no module, and what several ranks share: their gradients would be mixed with wrong weights."""
    if not isinstance(model, nn.Module):
        raise UpdateError(f"model={model!r:.80} is a {type(model).__name__}; expected a torch.nn.Module.")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        ranks = torch.distributed.get_world_size(model.process_group)
        if ranks > 1 or model.gradient_as_bucket_view:
            raise UpdateError(
                f"this model is wrapped in DistributedDataParallel over {ranks} ranks, with gradient_as_bucket_view="
                f"{model.gradient_as_bucket_view}; this version is exact within one process only. Give the model itself, "
                "in one process."
            )


def _backward(gradient_sum: GradientSum, loss: Tensor, start: Tensor, index: int, tracker: Tracker | None) -> bool:
    if tracker is None:
        return gradient_sum.backward(loss, start)
    tracker.begin(Backward)
    is_finite = gradient_sum.backward(loss, start)
    tracker.end(Backward, micro_batch=index)
    tracker.begin(Accumulate)
    tracker.end(Accumulate, micro_batch=index, parameters=tuple(gradient_sum.parameters))
    return is_finite


@dataclass(frozen=True, slots=True)
class _Done:
    """What the micro-batches so far have left."""

    kept: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    metrics: list[Metrics] = field(default_factory=list)
    unweighted: dict[int, Metrics] = field(default_factory=dict)
    """Metrics of the micro-batches of no units."""

    @property
    def has_metrics(self) -> bool:
        return any(self.metrics)

    def add(self, index: int, loss: Tensor, metrics: Metrics, *, is_kept: bool) -> None:
        if not is_kept:
            self.dropped.append(index)
            return
        self.kept.append(index)
        self.losses.append(loss)
        self.metrics.append(detached(metrics))

    def result(self, shares: Shares, cut: MicroBatches) -> Accumulated:
        units = [shares.units[index] for index in self.kept]
        weights = shares_of(units, shares.reduction).each
        return Accumulated(
            loss=_batch_loss(shares, self.losses, weights),
            units=sum(units),
            micro_batches=len(shares.units),
            metrics=combine(
                [*self.metrics, *self.unweighted.values()],
                [*units, *[0.0] * len(self.unweighted)],
                cut,
                [*self.kept, *self.unweighted],
            ),
            dropped=tuple(self.dropped),
        )


def _batch_loss(shares: Shares, losses: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """0 for a batch of no units; nan where all that counts was dropped."""
    if shares.is_empty:
        return torch.zeros(())
    return weighted_sum(losses, weights) if losses else torch.tensor(torch.nan)


def _result_together(together: Together, work: Work) -> Accumulated:
    weights = shares_of(together.units, work.shares.reduction).each
    metrics = [detached(part) for part in together.metrics]
    return Accumulated(
        loss=_batch_loss(work.shares, together.losses, weights),
        units=sum(together.units),
        micro_batches=len(work.micro_batches),
        metrics=combine(metrics, together.units, *_rows_together(together, work.cut)),
        dropped=tuple(together.dropped),
    )


def _rows_together(together: Together, cut: MicroBatches) -> tuple[MicroBatches | None, Sequence[int]]:
    """Whose row is whose: by micro-batch, or for a loss that saw all rows joined, in the order they were joined."""
    if together.counted is not None:
        return cut, together.counted
    if cut.cut is None or together.dropped:
        return None, ()
    joined = tuple(row for rows in cut.cut.rows for row in rows)
    return MicroBatches((cut,), Cut(rows=(joined,), lengths=(max(cut.cut.lengths),))), (0,)


def _check(model: nn.Module, objective: Objective | Coupled, autocast: Autocast) -> None:
    check_model(model)
    if not isinstance(objective, Objective | Coupled):
        raise LossError(
            f"objective={objective!r} is a {type(objective).__name__}; expected an Objective. Use "
            "supervised(criterion), huggingface(), Objective(loss, units) or Coupled(encode, loss)."
        )
    if autocast is not None and not isinstance(autocast, torch.dtype | AbstractContextManager):
        raise UpdateError(
            f"autocast={autocast!r}: expected a dtype, such as torch.bfloat16, a torch.autocast(...) of your own, or None."
        )

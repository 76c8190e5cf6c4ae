"""Schedules, the order in which the passes of a batch run: `OneByOne` for independent rows, `TwoPasses` for coupled ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from anybatch.core.batch import Batch, join_rows, map_tensors, reorder_rows, tensors
from anybatch.core.engine import Outcome, Part, Schedule, Tools, part_of
from anybatch.core.events import Loss
from anybatch.core.hooks import NOTHING, around
from anybatch.core.metrics import Metrics, by_itself, detached
from anybatch.core.objective import Coupled, Objective, checked_loss, loss_and_metrics
from anybatch.core.options import UpdateOptions
from anybatch.core.parallelism import Needs, Parallelism, Ranks
from anybatch.core.plan import BatchPlan, Layout, Pass
from anybatch.core.plugins import lockstep_schedule
from anybatch.core.snapshot import MovingBuffers, Snapshot, TensorFile, WriteWatch
from anybatch.core.torch_private import at_least_fp32, leaves_of
from anybatch.errors import LossError


@dataclass(frozen=True, slots=True)
class OneByOne:
    """Forward and backward, one micro-batch at a time. `grad += sum_k (units_k / units) * d loss(micro_batch_k)`."""

    layout: ClassVar[Layout] = Layout()
    no_partial_gradients_because: ClassVar[str] = ""
    objective: Objective
    drops: bool = False
    """True if non-finite micro-batches are left out, so that none may be reduced over ranks before it was checked."""

    def compute(self, model: nn.Module, micro_batch: Batch) -> Any:
        return self.objective.loss(model, micro_batch)

    def needs(self, parallelism: Parallelism) -> Needs:
        reason = "dropping micro-batches that are not finite" if self.drops else None
        return Needs(needs_equal_passes=parallelism.needs_equal_passes, own_reduction=reason)

    def run(self, plan: BatchPlan, tools: Tools) -> Outcome:
        parts: list[Part] = []
        dropped: list[int] = []
        starts: tuple[Tensor, ...] = ()
        has_metrics = False
        hooks = tools.hooks
        blocks = [*(hook.around_batch() for hook in hooks), *(hook.around_counted() for hook in hooks)]
        with around(blocks) if blocks else NOTHING:
            for number, one in enumerate(plan.passes):
                if one.is_last and tools.sync.reduces_in_last_backward:
                    tools.barrier.hold(is_final=True)
                with tools.sync.around_pass(is_last=one.is_last):
                    part, is_kept, starts = _run_pass(plan, one, number, starts, tools)
                for hook in hooks:
                    hook.after_pass(one.micro_batch, is_kept=is_kept, reports=one.reports)
                has_metrics = has_metrics or bool(part.metrics)
                if one.reports and is_kept:
                    parts.append(part)
                elif one.reports:
                    dropped.append(one.micro_batch)
            if dropped and plan.terms.each:
                return Outcome(restart_without=dropped)
            parts += _left_out(plan, tools, has_metrics=has_metrics)
            if tools.needs_equal_passes:
                tools.sync.give_zeros(plan, tools)
        return Outcome(parts=parts, dropped=dropped, dtype=starts[0].dtype)


def _run_pass(
    plan: BatchPlan, one: Pass, number: int, starts: tuple[Tensor, ...], tools: Tools
) -> tuple[Part, bool, tuple[Tensor, ...]]:
    """Run one pass; False if it was dropped. Its graph is freed on return, before the next forward."""
    before = None if tools.dropping is None else tools.dropping.before_pass()
    for hook in tools.hooks:
        hook.before_pass()
    root, loss, metrics, units = tools.loss_of(plan, one)
    starts = starts or tools.start.each(plan, loss)
    is_kept = (tools.dropping is None or tools.dropping.accepts(loss)) and tools.backward(
        root, starts[number], one.micro_batch
    )
    if not is_kept and before is not None:
        before.put_back()
    for hook in tools.hooks if not is_kept or not one.reports else ():
        hook.discard_pass()
    return part_of(one.micro_batch, units, loss, metrics), is_kept, starts


def _left_out(plan: BatchPlan, tools: Tools, *, has_metrics: bool) -> list[Part]:
    """Run micro-batches without targets, if BatchNorm, metrics or unused parameters need them.

    They run if a hook needs all rows, if there are metrics, or if a parameter has no gradient yet and may get zeros from them.
    After DDP's reduction the last reason does not count, because ranks would no longer agree on which parameters have one.
    If passes are collectives, only metrics count: a rank with fewer repeats its last, and `Sync.give_zeros` sets zeros.
    """
    missing = plan.num_left_out - len(plan.left_out) if tools.needs_equal_passes else 0
    if not plan.left_out and not missing:
        return []
    bare = [] if tools.sync.reduces_in_last_backward else [p for p in tools.gradients.parameters if p.grad is None]
    if (
        not has_metrics
        and not bare
        and (tools.needs_equal_passes or not any(hook.needs_all_rows for hook in tools.hooks))
    ):
        return []
    parts = [_forward_alone(plan, index, tools, bare) for index in plan.left_out]
    for _ in range(missing):
        _forward_alone(plan, plan.passes[-1].micro_batch, tools, bare)
    return parts if has_metrics else []


def _forward_alone(plan: BatchPlan, index: int, tools: Tools, bare: list[nn.Parameter]) -> Part:
    """Run a micro-batch without units for its metrics, and set zero gradients for the parameters in `bare` that it uses."""
    for hook in tools.hooks:
        hook.before_pass()
    with tools.sync.forward_only(), torch.set_grad_enabled(bool(bare) and torch.is_grad_enabled()):
        loss, metrics = loss_and_metrics(tools.quiet_forward()(plan.cut[index], index))
        touched = {id(leaf) for leaf in leaves_of([loss])} if bare else ()
    for parameter in bare:
        if id(parameter) in touched and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype or parameter.dtype)
    return part_of(index, plan.units[index], None, metrics)


def alone(tensor: Tensor) -> Tensor:
    """Copy a view, which would keep the whole storage alive."""
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


def leaf(tensor: Tensor) -> Tensor:
    """Detach a tensor and make it a leaf of a new graph."""
    return by_itself(tensor).requires_grad_(tensor.is_floating_point() or tensor.is_complex())


def no_rows(representations: Batch) -> Batch:
    """Return the same nesting with 0 rows, still connected to the graph."""
    return map_tensors(representations, lambda tensor: tensor[:0] if tensor.dim() > 0 else tensor)


def in_own_order(plan: BatchPlan, joined: Batch) -> Batch:
    """Restore the batch's order of rows in the joined representations, because a loss may depend on positions."""
    rows = [row for one in plan.passes if one.reports for row in plan.cut.row_numbers[one.micro_batch]]
    order = sorted(range(len(rows)), key=rows.__getitem__)
    if plan.cut.cut is None or order == list(range(len(rows))):
        return joined
    for tensor in tensors(joined):
        if tensor.dim() > 0 and len(tensor) != len(rows):
            raise LossError(
                f"encode returned {len(tensor)} entries for {len(rows)} rows, which were sorted to be cut: whose they are "
                "cannot be told, so the loss would not see the batch's own order. Return one entry per row, rows first (rows x "
                "views x width for several), or cut by Rows(n), which leaves rows in their order."
            )
    return reorder_rows(joined, order)


def rows_of_all(ranks: Ranks, own: Batch) -> Batch:
    """All-gather the representations. Only this rank's rows get gradients; 0-dim tensors are not gathered."""
    if ranks.size == 1:
        return own
    _check_tensors(own)
    counts = ranks.gather([len(tensor) for tensor in tensors(own) if tensor.dim() > 0])
    columns = iter(list(zip(*counts, strict=True)))
    return map_tensors(
        own, lambda tensor: ranks.all_rows(tensor, [int(n) for n in next(columns)]) if tensor.dim() > 0 else tensor
    )


def share_out(ranks: Ranks, parameters: Sequence[nn.Parameter], leaves: Sequence[Batch]) -> None:
    """Divide gradients by the number of ranks: every rank computed the same loss, and gradients are summed over ranks."""
    if ranks.size == 1:
        return
    held = [tensor.grad for nest in leaves for tensor in tensors(nest) if tensor.dim() == 0]
    for grad in [*held, *(parameter.grad for parameter in parameters)]:
        if grad is not None:
            grad.div_(ranks.size)


def roots_of(representations: Batch, leaves: Batch) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors that backward starts from, and the gradients of their leaves."""
    chosen = [
        (root, leaf.grad)
        for root, leaf in zip(tensors(representations), tensors(leaves), strict=True)
        if root.requires_grad and leaf.grad is not None
    ]
    return [root for root, _ in chosen], [grad for _, grad in chosen if grad is not None]


def check_graph(coupled: Coupled, representations: Batch) -> None:
    """Refuse representations that do not depend on any parameter."""
    held = list(tensors(representations))
    if not held:
        raise LossError(
            f"encode returned {type(representations).__name__} without a tensor; expected representations, rows first: "
            "a tensor or a nesting of tensors."
        )
    if not any(tensor.requires_grad for tensor in held) and not coupled.parameters():
        raise LossError(
            "the representations do not depend on any parameter that requires a gradient. Check that the model is not "
            "frozen whole, and that encode neither detaches its output nor runs under torch.no_grad()."
        )


def check_same_shapes(index: int, first: Batch, again: Batch) -> None:
    """Refuse an encode that returned other shapes in its second forward of the same rows."""
    for one, other in zip(tensors(again), tensors(first), strict=True):
        if one.shape != other.shape:
            raise LossError(
                f"encode gave shape {tuple(other.shape)} for micro-batch {index}, and {tuple(one.shape)} when it ran "
                "again. It must depend on the model, the rows and torch's random state only."
            )


def _check_tensors(representations: Batch) -> None:
    """Refuse lists of strings or numbers, which cannot be gathered over ranks."""
    for item in representations if isinstance(representations, list | tuple) else ():
        if isinstance(item, str | int | float):
            raise LossError(
                f"encode returned a list that holds {item!r:.40}; over several ranks only tensors are gathered. Return labels "
                "and the like as tensors, one entry per row."
            )


@dataclass(slots=True)
class _Encoded:
    """One micro-batch between its two passes."""

    one: Pass
    before: Snapshot | None
    """State at the start of its first pass; None for the last micro-batch, which does not run again."""
    representations: Batch
    """Only those of the last micro-batch have a graph."""
    leaves: Batch = None
    """The representations as leaves of the loss's graph: the second pass starts from their `.grad`."""


@dataclass(frozen=True, slots=True)
class TwoPasses:
    """Gradient caching (GradCache), for a loss over all rows at once.

    1. Forward of every micro-batch without a graph: its representations.
    2. Loss over all rows, and its gradient with respect to the representations.
    3. Forward of every micro-batch again, with the random state of the first time, and backward from that gradient.

    This is the chain rule applied at the representations, so it is exact. The last micro-batch keeps its graph from step 1,
    which saves one forward. A non-finite micro-batch makes the loss of all non-finite.
    """

    coupled: Coupled
    layout: ClassVar[Layout] = Layout(
        runs_all=True, repeats_first=True
    )  # the last one keeps its graph, so it must count
    no_partial_gradients_because: ClassVar[str] = (
        "the loss is coupled: its rows look at each other, and no micro-batch has a gradient of its own"
    )

    def compute(self, model: nn.Module, micro_batch: Batch) -> Any:
        return self.coupled.encode(model, micro_batch)

    def needs(self, parallelism: Parallelism) -> Needs:
        return Needs(needs_equal_passes=parallelism.needs_equal_passes, own_reduction="the gradient of a coupled loss")

    def run(self, plan: BatchPlan, tools: Tools) -> Outcome:
        buffers = MovingBuffers([tools.forward.model])
        buffers.snapshot()  # takes the first copies
        with around([hook.around_batch() for hook in tools.hooks]):
            with around([hook.around_counted() for hook in tools.hooks]):
                encoded = [self._first(plan, one, buffers, tools) for one in plan.passes]
            nonfinite = [each.one.micro_batch for each in encoded if not tools.accepts(each.representations)]
            if nonfinite:
                return Outcome(restart_without=nonfinite)
            loss, metrics, is_finite = self._loss(plan, encoded, tools)
            if not is_finite:
                return Outcome(restart_without=plan.micro_batches)
            after = buffers.snapshot()  # the first pass counts: changes of the second are undone
            nonfinite = self._second(plan, encoded, buffers, tools)
            buffers.put_back(after)
        part = Part(micro_batch=None, units=plan.units_seen, loss=loss, metrics=detached(metrics))
        return Outcome(parts=[part], restart_without=nonfinite, dtype=loss.dtype)

    def _first(self, plan: BatchPlan, one: Pass, buffers: MovingBuffers, tools: Tools) -> _Encoded:
        for hook in tools.hooks:
            hook.before_pass()
        before = None if one.is_last else buffers.snapshot()
        watch = WriteWatch.of(plan.cut[one.micro_batch])
        with torch.set_grad_enabled(one.is_last and torch.is_grad_enabled()), tools.sync.around_pass(is_last=False):
            representations = tools.forward(plan.cut[one.micro_batch], one.micro_batch)
        watch.check("a coupled loss runs every forward twice, the second time")
        for hook in () if one.reports else tools.hooks:
            hook.discard_pass()
        return _Encoded(one, before, representations if one.is_last else map_tensors(representations, alone))

    def _loss(self, plan: BatchPlan, encoded: list[_Encoded], tools: Tools) -> tuple[Tensor, Metrics, bool]:
        """Compute the loss of all rows and its gradient in the leaves; False if it is not finite."""
        check_graph(self.coupled, encoded[-1].representations)
        tools.events.begin(Loss)
        for each in encoded:
            each.leaves = map_tensors(each.representations, leaf)
        tools.barrier.hold()
        seen = join_rows([each.leaves if each.one.reports else no_rows(each.leaves) for each in encoded])
        loss, metrics = loss_of_all(self.coupled, in_own_order(plan, seen), tools)
        tools.events.end_loss(loss, micro_batch=None, units=sum(plan.units), share=1.0)
        if not tools.accepts(loss):
            return loss.detach(), metrics, False
        is_finite = tools.gradients.backward(loss, tools.start.whole(loss))
        share_out(tools.ranks, tools.gradients.parameters, [each.leaves for each in encoded])
        return loss.detach(), metrics, is_finite

    def _second(self, plan: BatchPlan, encoded: list[_Encoded], buffers: MovingBuffers, tools: Tools) -> list[int]:
        """Run backward through every micro-batch, the last one first, whose graph exists; return the non-finite ones."""
        last = encoded.pop()
        with tools.sync.around_pass(is_last=not encoded):
            nonfinite = _backward(last, last.representations, tools)
        last.representations = last.leaves = None  # frees its graph before the next forward
        for number, each in enumerate(encoded, start=1):
            assert each.before is not None
            buffers.put_back(each.before)
            index = each.one.micro_batch
            with tools.sync.around_pass(is_last=number == len(encoded)):
                nonfinite += _backward(each, tools.forward(plan.cut[index], index), tools)
        return nonfinite


def loss_of_all(coupled: Coupled, own: Batch, tools: Tools) -> tuple[Tensor, Metrics]:
    """Compute the loss over the rows of all ranks, in fp32 or better, and its metrics."""
    with tools.forward.autocast:
        loss, metrics = checked_loss(coupled.loss(rows_of_all(tools.ranks, own)))
    return at_least_fp32(loss), metrics


def _backward(encoded: _Encoded, again: Batch, tools: Tools) -> list[int]:
    check_same_shapes(encoded.one.micro_batch, encoded.leaves, again)
    roots, grads = roots_of(again, encoded.leaves)
    is_finite = not roots or tools.backward(roots, grads, encoded.one.micro_batch)
    return [] if is_finite else [encoded.one.micro_batch]


def schedule_for(
    objective: Objective | Coupled,
    layers: Mapping[str, nn.Module],
    averaging: Mapping[str, nn.Module],
    options: UpdateOptions,
    file: TensorFile,
) -> Schedule:
    """Choose the schedule of a batch; `layers` are the norm layers that depend on the cut, `file` is for offloading."""
    if options.batch_norm == "exact" and layers:
        return lockstep_schedule(objective, layers, averaging, options.offload, file)  # type: ignore[no-any-return]
    if isinstance(objective, Coupled):
        return TwoPasses(objective)
    return OneByOne(objective, drops=options.on_nonfinite == "drop")

"""The schedule of `batch_norm="exact"`: all micro-batches forward in lockstep, one backward through all of them."""

import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from anybatch.batch_norm.layers import Layers, replaced
from anybatch.batch_norm.lockstep import Lockstep
from anybatch.batch_norm.offload import SavedTensors
from anybatch.batch_norm.pooled import PooledStatistics
from anybatch.core import (
    SILENT,
    Batch,
    BatchPlan,
    Coupled,
    Forward,
    Layout,
    Loss,
    Needs,
    Objective,
    Offload,
    Outcome,
    Parallelism,
    Part,
    TensorFile,
    Tools,
    around,
    common_device,
    detached,
    in_own_order,
    inside_compiled,
    is_compiled_in_place,
    join_rows,
    leaf,
    loss_of_all,
    map_tensors,
    no_rows,
    part_loss,
    part_of,
    roots_of,
    share_out,
    tensors,
)
from anybatch.errors import UpdateError


def in_lockstep(
    objective: Objective | Coupled, layers: Layers, averaging: Layers, offload: Offload, file: TensorFile
) -> "InLockstep":
    """Return the schedule of a batch. `layers` are BatchNorms, `averaging` InstanceNorms; `file` is for offloading to disk."""
    return InLockstep(objective, layers, averaging, offload, file)


@dataclass(frozen=True, slots=True)
class InLockstep:
    """One batch through norm layers that see all of it.

    Every micro-batch runs, those without units too, because their rows are part of the statistics. After activations or losses
    that are not finite, the batch starts again without the micro-batches at fault. If only the gradient is not finite, no
    micro-batch can be named, and all are left out.
    """

    objective: Objective | Coupled
    layers: Layers
    averaging: Layers
    """InstanceNorm layers; only their running statistics depend on the other micro-batches."""
    offload: Offload
    file: TensorFile = field(repr=False)
    layout: ClassVar[Layout] = Layout(runs_all=True)
    no_partial_gradients_because: ClassVar[str] = (
        "batch_norm='exact' makes rows look at each other, and no micro-batch has a gradient of its own"
    )

    def compute(self, model: nn.Module, micro_batch: Batch) -> Any:
        run = self.objective.encode if isinstance(self.objective, Coupled) else self.objective.loss
        return run(model, micro_batch)

    def needs(self, parallelism: Parallelism) -> Needs:
        return Needs(own_reduction="the gradient of batch_norm='exact'", one_collective=True)

    def run(self, plan: BatchPlan, tools: Tools) -> Outcome:
        model = tools.forward.model
        _check_compiled(model, self.layers)
        with tools.sync.around_pass(is_last=True):
            micro_batches = _loaded(plan, tools)
            parameters = [*model.parameters(), *tools.gradients.parameters]
            device = parameters[0].device if parameters else torch.device("cpu")
            stay = [*parameters, *model.buffers(), *tensors(micro_batches)]
            with SavedTensors(self.offload, stay, device, self.file) as saved:
                lockstep = _lockstep(plan, micro_batches, saved, tools)
                statistics = PooledStatistics(lockstep, tools.accepts, tools.ranks, plan.num_own)
                with (
                    replaced({**self.layers, **self.averaging}, statistics.compute),
                    around([hook.in_lockstep(lambda: lockstep.current) for hook in tools.hooks]),
                ):
                    tools.events.begin(Forward)
                    results = lockstep.run()
                    tools.events.end(Forward, output=None)
                    if statistics.not_finite:
                        return Outcome(restart_without=sorted(statistics.not_finite))
                    if isinstance(self.objective, Coupled):
                        return _backward_joined(self.objective, plan, results, tools)
                    return _backward_each(plan, results, tools)


def _check_compiled(model: nn.Module, layers: Layers) -> None:
    """Refuse a forward that is compiled around norm layers, because it cannot stop at them."""
    inside = set(layers.values())
    for name, module in model.named_modules():
        is_compiled = inside_compiled(module) is not None or is_compiled_in_place(module)
        if is_compiled and not inside.isdisjoint(module.modules()):
            raise UpdateError(
                f"batch_norm='exact': {name or 'the model'} is compiled around BatchNorm layers, and a compiled forward cannot "
                "stop at them to wait for the other micro-batches. Compile the parts between the BatchNorms, or none, or use "
                "batch_norm='micro'."
            )


def _loaded(plan: BatchPlan, tools: Tools) -> list[Batch]:
    """Load the micro-batch of every pass to the device of the parameters; under FSDP2 the shards may lie elsewhere."""
    device = common_device(tools.forward.model.parameters()) or tools.forward.device
    micro_batches = [plan.cut[one.micro_batch] for one in plan.passes]
    is_there = all(tensor.device == device for tensor in tensors(micro_batches))
    forward = replace(tools.forward, device=None if is_there else device)
    return [forward.load(part, one.micro_batch) for part, one in zip(micro_batches, plan.passes, strict=True)]


def _lockstep(plan: BatchPlan, micro_batches: list[Batch], saved: SavedTensors, tools: Tools) -> Lockstep[Any]:
    def run(micro_batch: Batch, index: int) -> Any:
        # an autocast context remembers the state it found: one for each thread
        autocast = copy.copy(tools.forward.autocast)
        forward = replace(tools.forward, device=None, events=SILENT, autocast=autocast)
        with saved.hooks():
            return forward(micro_batch, index)

    numbers = [one.micro_batch for one in plan.passes]
    return Lockstep([partial(run, *both) for both in zip(micro_batches, numbers, strict=True)], numbers)


def _backward_each(plan: BatchPlan, results: list[Any], tools: Tools) -> Outcome:
    """Add the gradient of losses that each micro-batch has for itself. Empties `results`."""
    # at least one pass, because backward may be a collective
    counted = [number for number, one in enumerate(plan.passes) if one.share] or [len(plan.passes) - 1]
    passes = [plan.passes[number] for number in counted]
    both = zip(counted, passes, strict=True)
    losses = [part_loss(results[number], plan.place(one.micro_batch)) for number, one in both]
    results.clear()
    roots = torch.stack([part.root for part in losses])
    parts = [
        (one, part_of(one.micro_batch, part.units, part.loss, part.metrics))
        for one, part in zip(passes, losses, strict=True)
    ]
    losses.clear()
    not_finite = [one.micro_batch for one, part in parts if not tools.accepts(part.loss)]
    if not_finite:
        return Outcome(restart_without=not_finite)
    for one, part in parts:
        assert part.loss is not None
        tools.events.begin(Loss)
        tools.events.end_loss(part.loss, micro_batch=one.micro_batch, units=part.units, share=one.share)
    starts = tools.start.each(plan, roots)
    if not tools.backward(roots, torch.stack([starts[number] for number in counted])):
        return Outcome(restart_without=plan.micro_batches)
    return Outcome(parts=[part for one, part in parts if one.reports], dtype=roots.dtype)


def _backward_joined(objective: Coupled, plan: BatchPlan, results: list[Batch], tools: Tools) -> Outcome:
    """Add the gradient of one loss over the representations of all rows. Empties `results`."""
    both = zip(plan.passes, results, strict=True)
    own = in_own_order(plan, join_rows([result if one.reports else no_rows(result) for one, result in both]))
    results.clear()
    is_alone = tools.ranks.size == 1
    leaves = own if is_alone else map_tensors(own, leaf)
    loss, metrics = loss_of_all(objective, leaves, tools)
    if not tools.accepts(loss) or not tools.backward(loss, tools.start.whole(loss)):
        return Outcome(restart_without=plan.micro_batches)
    if not is_alone:  # other ranks' rows have no graph here: backward goes on from this rank's leaves
        share_out(tools.ranks, tools.gradients.parameters, [leaves])
        tools.gradients.backward(*roots_of(own, leaves))
    part = Part(micro_batch=None, units=plan.units_seen, loss=loss.detach(), metrics=detached(metrics))
    return Outcome(parts=[part], dtype=loss.dtype)

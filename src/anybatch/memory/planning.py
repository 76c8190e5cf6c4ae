"""`plan()`: the largest micro-batch that fits, before anything runs."""

import gc
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch.optim import Optimizer

from anybatch.batches import Batch, Dealt, Rows, Tokens, tensors
from anybatch.errors import PlanError
from anybatch.memory.available import available_bytes
from anybatch.memory.predicting import (
    Breakdown,
    Checkpointing,
    LargestFitting,
    MicroBatchSource,
    Plan,
    SizePeak,
    Trials,
    find_largest_fitting,
    find_ways,
    micro_batch_source_of,
    model_bytes,
    notes_for,
    recomputing_of,
    start_trials,
)
from anybatch.memory.ranking import Ranking, rank_ways, why_unmeasured
from anybatch.memory.tracing import (
    Moment,
    Moments,
    Parts,
    TrialSetup,
    bytes_of,
    highest,
    is_watched,
    keeping_random_states,
    optimizer_tensors,
)
from anybatch.memory.unwrapping import without_wrappers
from anybatch.objectives import Coupled, Objective
from anybatch.options import Autocast, BatchNorm, Check, Offload, Sums
from anybatch.passes import Running, check_of
from anybatch.proof import check_cost
from anybatch.sizes import parse_bytes
from anybatch.torch_inside import forget_fake_results, is_compiled_in_place

MARGIN = 0.05
"""The share of the memory that a plan leaves free, unless told otherwise."""


def plan(
    model: nn.Module,
    optimizer: Optimizer | None,
    objective: Objective | Coupled,
    batch: Batch,
    *,
    memory: str | int | None = None,
    device: str | torch.device | None = None,
    split: Rows | Tokens | None = None,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    autocast: Autocast = None,
    batch_norm: BatchNorm | None = None,
    offload: Offload = "auto",
    sums: Sums = "fp32",
    check: Check | bool = "first",
    margin: float = MARGIN,
    checkpointing: bool = True,
    ranking: bool = True,
    running: Running | None = None,
) -> Plan:
    """The peak memory of an update for any micro-batch size, and the largest that fits into `memory`.

    Tries updates on a copy of fake tensors, which takes no memory and runs nothing, so that model and batch may lie on the
    meta device and `device` need not be there; where fake tensors cannot see or run it, small real steps on a real copy.
    `memory` is all there is for it, "6GiB" or bytes; None: what the device has free, with what this model already takes there.
    Without an optimizer it is the gradient alone. With `split=Tokens(...)` sizes are budgets of tokens. The options are
    those of `Update`; `running` gives all but `check` as one value instead: with `check=True` what that takes before the first
    batch counts. In `DistributedDataParallel` each rank plans for its own rows,
    and its buckets are taken off `memory`; a model sharded by `fully_shard` has to be planned before. Parameters, buffers,
    gradients, the optimizer and random states stay as they are.

    Where the batch has to be cut, `ranking` has the ways that fit by the time of an update's passes: smaller micro-batches,
    gradient checkpointing, on an accelerator saved tensors on the host. Real passes are measured for it, for some seconds and
    inside `memory`, where the model lies on `device`; `ranking=False` measures none.
    """
    if not 0 <= margin < 1:
        raise PlanError(f"plan(margin={margin!r}): expected a share of the memory to leave free, from 0 to below 1.")
    if isinstance(batch, Dealt):
        batch = batch.batch
    module, bucket_bytes = without_wrappers(model)
    parts = module, optimizer, objective
    there = _device_of(module, device)
    asked = None if memory is None else parse_bytes(memory) - bucket_bytes
    if running is None:
        running = Running(
            autocast=autocast,
            batch_norm=batch_norm,
            offload=offload,
            clip_norm=clip_norm,
            clip_value=clip_value,
            sums=sums,
        )
    if running.sums == "auto":
        again = partial(
            plan,
            model,
            optimizer,
            objective,
            batch,
            memory=memory,
            device=device,
            split=split,
            check=check,
            margin=margin,
            checkpointing=checkpointing,
            ranking=ranking,
        )
        in_fp32 = again(running=replace(running, sums="fp32"))
        return in_fp32 if in_fp32.fits else again(running=replace(running, sums="param"))
    with keeping_random_states(), ExitStack() as undo:
        source = micro_batch_source_of(batch, split if isinstance(split, Tokens) else None)
        is_elsewhere = there.type != "cpu" and all(tensor.device.type != there.type for tensor in tensors(source.batch))
        own = {tensor.device.type for tensor in (*module.parameters(), *module.buffers())}
        is_in_place = own <= {there.type} and not bucket_bytes and not is_watched(module)
        batch_bytes = 0 if is_elsewhere else source.nbytes
        cost = check_cost(module, running.autocast) if check_of(check) == "full" else None
        setup = TrialSetup(parts, there, batch_bytes, is_elsewhere, running, cost, is_in_place)
        trials = start_trials(setup, source, undo)
        # what the first trial had torch load is no longer free, nor are buckets that are there already
        room = available_bytes(there) + _already(parts, there) if asked is None else asked
        limit = int(room * (1 - margin))
        found = find_largest_fitting(trials, limit)
        moments = _moments(trials, found)
        saved, recomputed = _try_checkpointing(trials, found) if checkpointing else (None, ())
        ranked = Ranking()
        if ranking:
            why_not = why_unmeasured(trials, is_wrapped=module is not model or is_compiled_in_place(module))
            tokens = split if isinstance(split, Tokens) else None
            ranked = rank_ways(trials, found, moments, limit, tokens=tokens, why_not=why_not)
    trials.seen.clear()
    forget_fake_results()
    gc.collect()
    found.kept.look()  # without the records of the trials
    return Plan(
        unit="rows" if source.row_length is None else "tokens",
        micro_batch=found.size,
        peak_bytes=found.peak,
        rows=source.num_rows,
        whole_size=source.num_rows * (source.row_length or 1),
        whole_bytes=found.whole,
        least_bytes=found.least,
        memory=room,
        margin=margin,
        device=str(there),
        sizes=_table(found, source, limit),
        breakdown=_breakdown(trials, found, moments),
        checkpointing=saved,
        method=trials.method,
        reason=trials.reason,
        is_confirmed=found.is_confirmed,
        notes=notes_for(trials, setup, found.shape, bucket_bytes=bucket_bytes),
        peaks=found.peaks,
        sums="param" if running.sums == "param" else "fp32",
        ways_to_fit=find_ways(
            moments,
            recomputed,
            "" if saved is None else saved.blocks,
            model_bytes(trials.probe.parts, is_fp32_sum=running.sums != "param"),
            limit=limit,
            beside=max(found.peak - highest(moments).total, 0),
        ),
        ranking=ranked.ways,
        not_ranked=ranked.left_out,
        kept=found.kept.bytes,
    )


def _table(found: LargestFitting, source: MicroBatchSource, limit: int) -> tuple[SizePeak, ...]:
    """Powers of two, the size chosen, and the whole batch in one piece."""
    one, most = source.row_length or 1, source.num_rows * (source.row_length or 1)
    sizes = {one * 2**power for power in range(source.num_rows.bit_length())} | {found.size}
    if found.peaks.envelope is None:
        sizes = {size for size, _ in found.peaks.tried}
    table = [SizePeak(size=size, peak=found.peaks.peak(size), fits=False) for size in sorted(sizes) if 0 < size < most]
    table.append(SizePeak(size=most, peak=found.whole, fits=False))
    return tuple(replace(entry, fits=entry.peak <= limit) for entry in table)


def _moments(trials: Trials, found: LargestFitting) -> Moments:
    """What memory is made of at the size found, moment by moment; without fake tensors what is known of one moment."""
    tried = trials.fake_peak(found.shape, is_whole=found.is_whole)
    return (_known_parts(trials, found.peak),) if tried is None else tried[1]


def _breakdown(trials: Trials, found: LargestFitting, moments: Moments) -> Breakdown:
    seen = highest(moments)
    rest = found.peak - seen.total  # what kernels allocate beside
    return Breakdown(**{**seen.kinds, "temporaries": max(seen.temporaries + rest, 0)})


def _known_parts(trials: Trials, peak: int) -> Moment:
    """The peak without fake tensors: what lives between updates is known, and the rest counts as activations."""
    model, optimizer, _ = trials.probe.parts
    parameters = bytes_of([*model.parameters(), *model.buffers()])
    gradients = bytes_of(one for one in model.parameters() if one.requires_grad)
    state = 0 if optimizer is None else bytes_of(optimizer_tensors(optimizer))
    rest = peak - parameters - gradients - state - trials.setup.batch_bytes
    return Moment(
        parameters=parameters,
        gradients=gradients,
        optimizer=state,
        activations=max(rest, 0),
        inputs=trials.setup.batch_bytes,
    )


def _try_checkpointing(trials: Trials, found: LargestFitting) -> tuple[Checkpointing | None, Moments]:
    """The same update with the model's repeated blocks recomputed, on fake tensors; None where that cannot run."""
    if trials.fake is None:
        return None, ()
    without = trials.fake_peak(found.shape, is_whole=found.is_whole)
    try:
        recomputing = recomputing_of(trials.fake.parts[0])
        with recomputing.on():
            tried = trials.fake_peak(found.shape, is_whole=found.is_whole, is_known=False)
    except Exception:  # blocks that cannot be run a second time have nothing to save
        return None, ()
    if tried is None or without is None:
        return None, ()
    saved = without[0] - tried[0]
    checkpointing = Checkpointing(
        blocks=recomputing.blocks,
        size=found.size or (trials.source.row_length or 1) * trials.smallest,
        peak=found.peak - saved,
        saved=max(saved, 0),
    )
    return checkpointing, tried[1]


def _device_of(model: nn.Module, device: str | torch.device | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    own = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    return torch.device("cpu") if own.type == "meta" else own


def _already(parts: Parts, device: torch.device) -> int:
    """Bytes of the model and the optimizer that lie on the device already: the update needs them, and they are not free."""
    model, optimizer, _ = parts
    held = [*model.parameters(), *model.buffers(), *([] if optimizer is None else optimizer_tensors(optimizer))]
    return bytes_of(tensor for tensor in held if tensor.device.type == device.type)

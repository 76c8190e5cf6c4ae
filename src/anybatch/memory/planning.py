"""`plan()`: the largest micro-batch that fits, before anything runs."""

import gc
import warnings
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from anybatch.core import (
    Autocast,
    Batch,
    BatchNorm,
    Coupled,
    Dealt,
    Objective,
    Offload,
    Rows,
    Running,
    Sums,
    forget_fake_results,
    tensors,
)
from anybatch.display import parse_bytes
from anybatch.errors import PlanError, levels_to_the_caller
from anybatch.memory.checkpointing import recompute_blocks
from anybatch.memory.largest_fitting import LargestFitting, find_largest_fitting
from anybatch.memory.memory_plan import Breakdown, Checkpointing, Plan, SizePeak
from anybatch.memory.meter import bytes_of, optimizer_tensors
from anybatch.memory.micro_batch_source import MicroBatchSource, micro_batch_source_of
from anybatch.memory.probe import TrialSetup
from anybatch.memory.recorder import Moment, Moments, highest
from anybatch.memory.trial_copies import Parts, is_watched, keeping_random_states
from anybatch.memory.trials import Trials, available_bytes, notes_for, start_trials
from anybatch.memory.ways_to_fit import find_ways, model_bytes
from anybatch.parallel import peeled, wrapping_of
from anybatch.ragged import Tokens

MARGIN = 0.05
"""The share of an accelerator's memory that a plan leaves free, unless told otherwise."""
MARGIN_ON_CPU = 0.15
"""The same on the CPU, whose kernels allocate and keep memory that neither fake tensors nor the profiler show."""


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
    check: object = None,
    margin: float | None = None,
    checkpointing: bool = True,
    ranking: bool | None = None,
    running: Running | None = None,
) -> Plan:
    """Predict the peak memory of an update for any micro-batch size, and the largest size that fits into `memory`.

    Tries updates on a copy of fake tensors, which takes no memory and runs nothing, so that model and batch may lie on the
    meta device and `device` need not be there; where fake tensors cannot see or run it, small real steps in place. Parameters,
    buffers, gradients, the optimizer and random states stay as they are. In `DistributedDataParallel` each rank plans for its
    own rows, and its buckets are taken off `memory`; a model sharded by `fully_shard` has to be planned before.

    Args:
        model: The model, with or without `torch.compile` and `DistributedDataParallel` around it.
        optimizer: Its optimizer; None: the gradient alone is planned.
        objective: The loss, as for `Update`.
        batch: A batch like those that will come.
        memory: All there is for the update, "6GiB" or bytes; None: what the device has free, with what this model already
            takes there.
        device: Where the update will run; None: where the model lies.
        split: With `Tokens(...)` sizes are budgets of tokens.
        clip_norm: As for `Update`; so are `clip_value`, `autocast`, `batch_norm`, `offload` and `sums`.
        check: Deprecated, and ignored: what is looked at before the first batch takes less than the update.
        margin: Share of the memory to leave free. None: 5 %, and 15 % on the CPU.
        checkpointing: Whether to say what gradient checkpointing would save.
        ranking: Deprecated, and ignored: ways are no longer timed.
        running: All options of `Update` as one value.

    Raises:
        PlanError: If the update can be tried neither on fake tensors nor by real steps, or free memory is not known.
    """
    if margin is not None and not 0 <= margin < 1:
        raise PlanError(f"plan(margin={margin!r}): expected a share of the memory to leave free, from 0 to below 1.")
    for name, value, instead in (
        ("check", check, "it counted check='full', which is gone; what is looked at now takes less than the update"),
        ("ranking", ranking, "ways are no longer timed; plan.checkpointing says what checkpointing would save"),
    ):
        if value is not None:
            said = f"plan({name}={value!r}) is deprecated and ignored: {instead}. Leave it out."
            warnings.warn(said, DeprecationWarning, stacklevel=levels_to_the_caller())
    if isinstance(batch, Dealt):
        batch = batch.batch
    if running is None:
        running = Running(
            autocast=autocast,
            batch_norm=batch_norm,
            offload=offload,
            clip_norm=clip_norm,
            clip_value=clip_value,
            sums=sums,
        )
    module, bucket_bytes = _without_wrappers(model)
    there = _device_of(module, device)
    if margin is None:
        margin = MARGIN_ON_CPU if there.type == "cpu" else MARGIN
    asked = None if memory is None else parse_bytes(memory) - bucket_bytes
    tokens = split if isinstance(split, Tokens) else None
    for kind in ("fp32", "param") if running.sums == "auto" else (running.sums,):
        planned = _plan(
            (module, optimizer, objective),
            micro_batch_source_of(batch, tokens),
            there,
            replace(running, sums=kind),
            asked=asked,
            margin=margin,
            checkpointing=checkpointing,
            bucket_bytes=bucket_bytes,
        )
        if planned.fits:
            break
    return planned


def _plan(
    parts: Parts,
    source: MicroBatchSource,
    there: torch.device,
    running: Running,
    *,
    asked: int | None,
    margin: float,
    checkpointing: bool,
    bucket_bytes: int,
) -> Plan:
    module = parts[0]
    with keeping_random_states(), ExitStack() as undo:
        is_elsewhere = there.type != "cpu" and all(tensor.device.type != there.type for tensor in tensors(source.batch))
        own = {tensor.device.type for tensor in (*module.parameters(), *module.buffers())}
        is_in_place = own <= {there.type} and not bucket_bytes and not is_watched(module)
        batch_bytes = 0 if is_elsewhere else source.nbytes
        trials = start_trials(TrialSetup(parts, there, batch_bytes, is_elsewhere, running, is_in_place), source, undo)
        # what the first trial had torch load is no longer free, nor are buckets that are there already
        room = available_bytes(there) + _already(parts, there) if asked is None else asked
        limit = int(room * (1 - margin))
        found = find_largest_fitting(trials, limit)
        moments = _moments(trials, found)
        saved, recomputed = _try_checkpointing(trials, found) if checkpointing else (None, ())
    trials.seen.clear()
    forget_fake_results()
    gc.collect()
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
        breakdown=_breakdown(found, moments),
        checkpointing=saved,
        method=trials.method,
        reason=trials.reason,
        is_confirmed=found.is_confirmed,
        notes=notes_for(trials, bucket_bytes=bucket_bytes),
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
    )


def _without_wrappers(model: nn.Module) -> tuple[nn.Module, int]:
    """The module inside `torch.compile` and `DistributedDataParallel`, and the bytes of the buckets that the latter keeps.

    Fake tensors follow a module's ops, which a compiler may fuse into fewer. A rank tries its own rows alone: a wrapped copy
    would wait for the other ranks, which may try other sizes.
    """
    *wrappers, model = peeled(model)
    buckets = sum(
        bytes_of(parameter for parameter in wrapper.parameters() if parameter.requires_grad)
        for wrapper in wrappers
        if isinstance(wrapper, DistributedDataParallel)
    )
    inside = wrapping_of(model)
    if inside.sharded or inside.replicated:
        how = "sharded by fully_shard" if inside.sharded else "wrapped in DistributedDataParallel in parts"
        raise PlanError(
            f"this {type(model).__name__} is {how}, and a copy to try an update on would wait for the other ranks. Plan the "
            "model before it is wrapped."
        )
    return model, buckets


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


def _breakdown(found: LargestFitting, moments: Moments) -> Breakdown:
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
        blocks = recompute_blocks(trials.fake.parts[0])  # of a copy that is not tried again without
        tried = trials.fake_peak(found.shape, is_whole=found.is_whole, is_known=False)
    except Exception:  # blocks that cannot be run a second time have nothing to save
        return None, ()
    if tried is None or without is None:
        return None, ()
    saved = without[0] - tried[0]
    checkpointing = Checkpointing(
        blocks=blocks,
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

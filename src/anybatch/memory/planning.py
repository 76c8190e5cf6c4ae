"""`plan()`: predict the peak memory of an update, and the largest micro-batch that fits."""

import gc
import warnings
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from anybatch.batch_norm import batch_norms
from anybatch.core import (
    Autocast,
    Batch,
    BatchNorm,
    Coupled,
    Dealt,
    Objective,
    Offload,
    Rows,
    Sums,
    UpdateOptions,
    clear_fake_cache,
    outer_random,
    tensors,
)
from anybatch.display import facts_table, html_block, html_table, parse_bytes, sentences, show_bytes
from anybatch.errors import PlanError, user_stacklevel
from anybatch.memory.checkpointing import recompute_blocks
from anybatch.memory.envelope import Peaks
from anybatch.memory.meter import bytes_of, optimizer_tensors
from anybatch.memory.probe import TrialSetup, is_watched
from anybatch.memory.recorder import Breakdown, Moment, Moments, highest
from anybatch.memory.trials import (
    LargestFitting,
    Method,
    MicroBatchSource,
    Trials,
    available_bytes,
    find_largest_fitting,
    micro_batch_source_of,
    start_trials,
)
from anybatch.memory.ways_to_fit import PRICE_OF_LOW_SUMS, WayToFit, find_ways, last_sentence
from anybatch.parallel import peeled, wrapping_of
from anybatch.ragged import Tokens

MARGIN = 0.05  # default share of an accelerator's memory to leave free
MARGIN_ON_CPU = 0.15  # default on the CPU, where kernels keep memory that neither fake tensors nor the profiler show


@dataclass(frozen=True, slots=True, kw_only=True)
class SizePeak:
    """Predicted peak of one micro-batch size."""

    size: int
    """Rows or tokens."""
    peak: int
    """Bytes."""
    fits: bool
    """True if the peak is within the memory, without its margin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointing:
    """Effect of gradient checkpointing of the model's repeated blocks."""

    blocks: str
    """The modules: path, number and class."""
    size: int
    """Micro-batch of the comparison, in rows or tokens."""
    peak: int
    """Peak with checkpointing, in bytes."""
    saved: int
    """Bytes saved; 0 if it does not help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Peak memory of an update for any micro-batch size, and the largest size that fits.

    A peak counts parameters, buffers, gradients, optimizer state, activations, temporaries, and the batch if it lies on the
    same device.
    """

    unit: Literal["rows", "tokens"]
    """Unit of sizes."""
    micro_batch: int
    """Largest size that fits; 0 if not even one row does."""
    peak_bytes: int
    """Peak at that size, or of one row if nothing fits."""
    rows: int
    """Rows of the batch."""
    whole_size: int
    """Size of the whole batch: rows, or padded tokens."""
    whole_bytes: int
    """Peak of the whole batch as one micro-batch."""
    least_bytes: int
    """Lowest peak of any size."""
    memory: int
    """All available memory, in bytes."""
    margin: float
    """Share of it that is left free."""
    device: str
    """Name of the device that the plan is for."""
    sizes: tuple[SizePeak, ...]
    """Peaks of some sizes, the largest that fits among them."""
    breakdown: Breakdown
    """Memory at the peak, by kind."""
    checkpointing: Checkpointing | None
    """Effect of gradient checkpointing; None if it was not tried or the model has no repeated blocks."""
    method: Method
    """Source of the peaks: fake tensors, or real steps."""
    reason: str
    """Why this method was used."""
    is_confirmed: bool
    """True if the chosen size was tried itself; its peak is not computed from others."""
    notes: tuple[str, ...]
    """Limits of this plan, one sentence each."""
    peaks: Peaks = field(repr=False)
    """Peaks of all sizes, which `peak` reads."""
    sums: Literal["fp32", "param"] = "fp32"
    """Dtype of the gradient sums of bf16 and fp16 parameters."""
    ways_to_fit: tuple[WayToFit, ...] = ()
    """Changes that save memory, with the peak of `micro_batch`, or of one row if nothing fits."""

    def __repr__(self) -> str:
        size = f"{self.micro_batch} {self.unit}" if self.fits else "nothing fits"
        peak = f"{show_bytes(self.peak_bytes)} of {show_bytes(self.limit)}"
        return (
            f"Plan({size}, peak {peak}, whole batch of {self.rows} rows {show_bytes(self.whole_bytes)}, {self.method})"
        )

    def _repr_html_(self) -> str:
        head, _, *rest = _sentences(self)
        sizes = [[entry.size, show_bytes(entry.peak), "yes" if entry.fits else "no"] for entry in self.sizes]
        parts = {kind: show_bytes(nbytes) for kind, nbytes in self.breakdown.kinds.items()}
        tables = html_table([self.unit, "peak", "fits"], sizes), sentences(["At the peak:"]), facts_table(parts)
        return html_block(head, *tables, sentences(rest))

    @property
    def limit(self) -> int:
        """Highest peak that fits: `memory` less the margin."""
        return int(self.memory * (1 - self.margin))

    @property
    def fits(self) -> bool:
        """True if some micro-batch fits."""
        return self.micro_batch > 0

    @property
    def needs_accumulation(self) -> bool:
        """True if the whole batch does not fit as one micro-batch."""
        return self.whole_bytes > self.limit

    def peak(self, size: int) -> int:
        """Predict the peak of an update in two or more micro-batches; `whole_bytes` is the peak of one.

        Args:
            size: Rows of a micro-batch, or its most tokens.

        Returns:
            Bytes. If sizes could only be tried one by one, an upper bound from the sizes around it.
        """
        return self.peaks.peak(size)

    def outside(self, size: int) -> int:
        """Return the part of `peak(size)` outside torch's allocator: nodes of the graph, leftovers of each micro-batch.

        Counted on the CPU, where it is the same memory: about 1,000 bytes per node and 2,000 per micro-batch.

        Args:
            size: Rows of a micro-batch, or its most tokens.

        Returns:
            Bytes.
        """
        return self.peaks.outside(size)

    def as_dict(self) -> dict[str, Any]:
        """Return everything but the curves as plain values for JSON."""
        found = {name: value for name, value in asdict(self).items() if name != "peaks"}
        return found | {"limit": self.limit, "fits": self.fits, "needs_accumulation": self.needs_accumulation}

    def describe(self) -> str:
        """Return the plan in sentences."""
        return "\n".join(_sentences(self))


def _sentences(plan: Plan) -> list[str]:
    limit = f"{show_bytes(plan.memory)} less {plan.margin:.0%} margin"
    if not plan.fits:
        head = (
            f"Not even one row fits: it needs {show_bytes(plan.least_bytes)}, and there is {limit} "
            f"({show_bytes(plan.limit)}) on {plan.device}."
        )
    elif not plan.needs_accumulation:
        head = (
            f"The whole batch of {plan.rows} rows fits in one piece: {show_bytes(plan.whole_bytes)} of {limit} on "
            f"{plan.device}. Accumulation is not needed."
        )
    else:
        head = (
            f"The largest micro-batch that fits is {plan.micro_batch} {plan.unit}: {show_bytes(plan.peak_bytes)} of {limit} "
            f"on {plan.device}. The whole batch of {plan.rows} rows in one piece would need {show_bytes(plan.whole_bytes)}."
        )
    parts = ", ".join(f"{kind} {show_bytes(nbytes)}" for kind, nbytes in plan.breakdown.kinds.items())
    lines = [head, f"Of it: {parts}."]
    if plan.checkpointing is not None:
        lines.append(_checkpointing_sentence(plan.checkpointing, plan.unit))
    confirmed = "tried at the size chosen" if plan.is_confirmed else "not tried at the size chosen"
    lines.append(f"Predicted with {plan.method}, {confirmed}: {plan.reason}.")
    if plan.sums == "param":
        lines.append(f"Gradients are summed in the parameters' own dtype: off by {PRICE_OF_LOW_SUMS}.")
    return [*lines, *plan.notes, last_sentence(plan.ways_to_fit, is_fitting=plan.fits)]


def _checkpointing_sentence(found: Checkpointing, unit: str) -> str:
    size = f"a micro-batch of {found.size} {unit if found.size != 1 else unit.removesuffix('s')}"
    if found.saved <= 0:
        return f"Checkpointing {found.blocks} would save nothing at {size}."
    return (
        f"Checkpointing {found.blocks} would save {show_bytes(found.saved)} at {size} (peak {show_bytes(found.peak)}), for a "
        "second forward of each."
    )


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
    options: UpdateOptions | None = None,
    running: UpdateOptions | None = None,
) -> Plan:
    """Predict the peak memory of an update for any micro-batch size, and the largest size that fits into `memory`.

    Trial updates run on fake tensors, which take no memory, so model and batch may be on the meta device and `device` need
    not exist here. If fake tensors cannot run the update, or miss memory of CPU kernels, small real updates run instead and
    are undone. Parameters, buffers, gradients, the optimizer and random states stay as they are. With
    `DistributedDataParallel` each rank plans for its own rows, and its buckets are subtracted from `memory`; plan a model
    before `fully_shard`.

    Args:
        model: The model, bare or wrapped by `torch.compile` or `DistributedDataParallel`.
        optimizer: Its optimizer; None plans the gradient alone.
        objective: The loss, as for `Update`.
        batch: A typical batch.
        memory: Memory of the whole update, "6GiB" or bytes; None: what is free on the device, plus what the model and the
            optimizer already take there.
        device: Device of the update; None: the model's.
        split: `Tokens(...)` plans budgets of tokens instead of rows.
        clip_norm: As for `Update`.
        clip_value: As for `Update`.
        autocast: As for `Update`.
        batch_norm: As for `Update`.
        offload: As for `Update`.
        sums: As for `Update`.
        check: Deprecated and ignored.
        margin: Share of the memory to leave free. None: 5 %, and 15 % on the CPU.
        checkpointing: Also predict what gradient checkpointing would save.
        ranking: Deprecated and ignored.
        options: All options of `Update` as one value; other keywords override it.
        running: Earlier name of `options`.

    Returns:
        The plan.

    Raises:
        PlanError: If the update can run neither on fake tensors nor for real, or free memory is unknown.

    >>> import torch
    >>> from anybatch import plan, supervised
    >>> model = torch.nn.Linear(8, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> batch = torch.randn(32, 8), torch.zeros(32).long()
    >>> plan(model, optimizer, supervised(torch.nn.CrossEntropyLoss()), batch, memory="64MiB").micro_batch
    32
    """
    if margin is not None and not 0 <= margin < 1:
        raise PlanError(f"plan(margin={margin!r}): expected a share of the memory to leave free, from 0 to below 1.")
    for name, value, instead in (
        ("check", check, "it counted check='full', which is gone; what is looked at now takes less than the update"),
        ("ranking", ranking, "ways are no longer timed; plan.checkpointing says what checkpointing would save"),
    ):
        if value is not None:
            said = f"plan({name}={value!r}) is deprecated and ignored: {instead}. Leave it out."
            warnings.warn(said, DeprecationWarning, stacklevel=user_stacklevel())
    single = UpdateOptions(
        autocast=autocast, batch_norm=batch_norm, offload=offload, clip_norm=clip_norm, clip_value=clip_value, sums=sums
    )
    options = replace(options or running or UpdateOptions(), **single.given())
    module, bucket_bytes = _without_wrappers(model)
    there = _device_of(module, device)
    if margin is None:
        margin = MARGIN_ON_CPU if there.type == "cpu" else MARGIN
    given_memory = None if memory is None else parse_bytes(memory) - bucket_bytes
    source = micro_batch_source_of(
        batch.batch if isinstance(batch, Dealt) else batch, split if isinstance(split, Tokens) else None
    )
    batch_on_host = there.type != "cpu" and all(tensor.device.type != there.type for tensor in tensors(source.batch))
    own = {tensor.device.type for tensor in (*module.parameters(), *module.buffers())}
    setup = TrialSetup(
        parts=(module, optimizer, objective),
        device=there,
        batch_bytes=0 if batch_on_host else source.nbytes,
        batch_on_host=batch_on_host,
        options=options,
        is_in_place=own <= {there.type} and not bucket_bytes and not is_watched(module),
    )
    for kind in ("fp32", "param") if options.sums == "auto" else (options.sums,):
        setup = replace(setup, options=replace(options, sums=kind))
        planned = _plan(setup, source, given_memory, margin, checkpointing=checkpointing, bucket_bytes=bucket_bytes)
        if planned.fits:
            break
    return planned


def _plan(
    setup: TrialSetup,
    source: MicroBatchSource,
    given_memory: int | None,
    margin: float,
    *,
    checkpointing: bool,
    bucket_bytes: int,
) -> Plan:
    with ExitStack() as undo:
        undo.callback(outer_random().restore)
        undo.enter_context(torch.random.fork_rng())
        trials = start_trials(setup, source, undo)
        room = given_memory
        if room is None:  # read after the first trial, for which torch loads libraries that take memory
            model, optimizer, _ = setup.parts
            held = [*model.parameters(), *model.buffers(), *optimizer_tensors(optimizer)]
            already = bytes_of(tensor for tensor in held if tensor.device.type == setup.device.type)
            room = available_bytes(setup.device) + already
        limit = int(room * (1 - margin))
        found = find_largest_fitting(trials, limit)
        tried = trials.fake_peak(found.shape, is_whole=found.is_whole)
        moments = (_known_parts(trials, found.peak),) if tried is None else tried[1]
        saved, recomputed = _try_checkpointing(trials, found, tried) if checkpointing else (None, ())
    trials.timelines.clear()
    clear_fake_cache()
    gc.collect()
    top = highest(moments)
    kernel_bytes = found.peak - top.total  # memory of kernels, which fake tensors do not show
    is_fp32_sum = setup.options.sums != "param"
    return Plan(
        unit="rows" if source.row_length is None else "tokens",
        micro_batch=found.size,
        peak_bytes=found.peak,
        rows=source.num_rows,
        whole_size=source.num_rows * source.row_size,
        whole_bytes=found.whole,
        least_bytes=found.least,
        memory=room,
        margin=margin,
        device=str(setup.device),
        sizes=_table(found, source, limit),
        breakdown=Breakdown(**{**top.kinds, "temporaries": max(top.temporaries + kernel_bytes, 0)}),
        checkpointing=saved,
        method=trials.method,
        reason=trials.reason,
        is_confirmed=found.is_confirmed,
        notes=_notes(trials, bucket_bytes),
        peaks=found.peaks,
        sums="fp32" if is_fp32_sum else "param",
        ways_to_fit=find_ways(
            trials.probe.parts,
            moments,
            recomputed,
            "" if saved is None else saved.blocks,
            is_fp32_sum=is_fp32_sum,
            limit=limit,
            kernel_bytes=max(kernel_bytes, 0),
        ),
    )


def _without_wrappers(model: nn.Module) -> tuple[nn.Module, int]:
    """Return the module inside `torch.compile` and `DistributedDataParallel`, and the bytes of DDP's buckets.

    A wrapped copy would wait for the other ranks, which may try other sizes.
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


def _device_of(model: nn.Module, device: str | torch.device | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    own = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    return torch.device("cpu") if own.type == "meta" else own


def _table(found: LargestFitting, source: MicroBatchSource, limit: int) -> tuple[SizePeak, ...]:
    """Return the peaks of powers of two, the chosen size, and the whole batch."""
    most = source.num_rows * source.row_size
    sizes = {source.row_size * 2**power for power in range(source.num_rows.bit_length())} | {found.size}
    if found.peaks.envelope is None:
        sizes = {size for size, _ in found.peaks.tried}
    peaks = {size: found.peaks.peak(size) for size in sorted(sizes) if 0 < size < most} | {most: found.whole}
    return tuple(SizePeak(size=size, peak=peak, fits=peak <= limit) for size, peak in peaks.items())


def _known_parts(trials: Trials, peak: int) -> Moment:
    """Break down a peak without fake tensors: what standing tensors do not explain counts as activations."""
    model, optimizer, _ = trials.probe.parts
    known = Moment(
        parameters=bytes_of([*model.parameters(), *model.buffers()]),
        gradients=bytes_of(one for one in model.parameters() if one.requires_grad),
        optimizer=bytes_of(optimizer_tensors(optimizer)),
        inputs=trials.setup.batch_bytes,
    )
    return replace(known, activations=max(peak - known.total, 0))


def _try_checkpointing(
    trials: Trials, found: LargestFitting, without: tuple[int, Moments] | None
) -> tuple[Checkpointing | None, Moments]:
    """Try the chosen size with gradient checkpointing, on fake tensors; None if that cannot run."""
    if trials.fake is None or without is None:
        return None, ()
    try:
        blocks = recompute_blocks(trials.fake.parts[0])  # of a copy that is not used without it any more
        tried = trials.fake_peak(found.shape, is_whole=found.is_whole)
    except Exception:  # blocks that cannot run a second time
        return None, ()
    assert tried is not None
    saved = without[0] - tried[0]
    size = found.size or trials.source.row_size * trials.smallest
    return Checkpointing(blocks=blocks, size=size, peak=found.peak - saved, saved=max(saved, 0)), tried[1]


def _notes(trials: Trials, bucket_bytes: int) -> tuple[str, ...]:
    setup, (model, optimizer, _), options = trials.setup, trials.setup.parts, trials.setup.options
    notes = []
    if bucket_bytes:
        notes.append(
            f"DistributedDataParallel keeps {show_bytes(bucket_bytes)} of buckets beside the gradients: they are taken off the "
            "memory, and not counted in peaks."
        )
    if setup.device.type != "cpu" and trials.method == "fake tensors":
        notes.append(
            f"On {setup.device} not counted: the context (0.3 to 1 GiB outside of torch's allocator), workspaces of cuBLAS and "
            "cuDNN, and what the caching allocator rounds up and leaves in pieces."
        )
        if trials.fake is not None and any("scaled_dot_product" in op for op in trials.fake.recorder.ops):
            notes.append(
                "Attention was followed through the CPU's kernel, which keeps no matrix of rows x heads x length x length; a "
                "GPU that has to fall back from its flash and memory-efficient kernels keeps one."
            )
        if options.autocast is not None:
            notes.append("Autocast was followed with the CPU's list of ops, which differs from a GPU's in a few.")
        if optimizer is not None and any(group.get("foreach", False) is None for group in optimizer.param_groups):
            notes.append("The optimizer was stepped over all parameters at once (foreach), as torch does on a GPU.")
    if batch_norms(model) and options.batch_norm == "exact" and options.offload is not None:
        notes.append("What batch_norm='exact' moves to the host or to disk is counted as if it stayed: an upper bound.")
    if options.prefetch and setup.batch_on_host:
        notes.append("prefetch=True has the inputs of two micro-batches on the device at a time; one is counted.")
    if trials.needs_whole_batch:
        notes.append("Micro-batches do not stand alone in this update, so each size was tried with the whole batch.")
    return tuple(notes)

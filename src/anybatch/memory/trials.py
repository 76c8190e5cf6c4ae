"""Trying sizes: which way an update can be tried, what was found, and what a trial cannot see."""

import gc
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from anybatch.core import Batch, BatchNormLayer, free_bytes
from anybatch.display import show_bytes
from anybatch.errors import PlanError, first_line
from anybatch.memory.envelope import Envelope, PassShape, fit_envelope
from anybatch.memory.memory_plan import Method
from anybatch.memory.meter import bytes_of, optimizer_tensors
from anybatch.memory.micro_batch_source import MicroBatchSource
from anybatch.memory.probe import NODE_BYTES, NORM_BYTES, FakeProbe, Probe, RealProbe, TrialSetup
from anybatch.memory.recorder import Moments, Timeline
from anybatch.memory.trial_copies import is_real


@dataclass(slots=True)
class Trials:
    """Updates tried on a copy, and their peaks."""

    setup: TrialSetup
    source: MicroBatchSource
    probe: Probe
    fake: FakeProbe | None
    """The same on fake tensors, where they can run: for what they are made of."""
    method: Method
    reason: str
    is_together: bool
    """True where micro-batches do not stand alone, so that the whole batch has to be tried in each size."""
    tried: dict[PassShape, int] = field(default_factory=dict)
    kinds: dict[PassShape, Moments] = field(default_factory=dict)
    """What fake tensors show the memory of a shape to be made of."""
    seen: dict[PassShape, Timeline] = field(default_factory=dict)
    _smallest: int = 0

    @property
    def is_fake(self) -> bool:
        """True where trials take no memory."""
        return self.method == "fake tensors"

    @property
    def smallest(self) -> int:
        """The fewest rows that a micro-batch can have: 1, or 2 where BatchNorm has no variance over one."""
        if self._smallest == 0:
            self._smallest = 1
            if not (self.is_together and self.is_fake):  # whole batches row by row are the slowest trial there is
                try:
                    self.peak((1, self.source.longest))
                except ValueError:
                    self._smallest = 2
        return self._smallest

    def left_behind(self) -> int:
        """What each further micro-batch leaves until the end of the update.

        BatchNorm's statistics, waiting to be merged; the random state that the second forward of a coupled loss starts from;
        the graph of each in lockstep; and what lies outside torch's allocator.
        """
        outside = self.outside()[1]
        if self.setup.is_coupled:
            return torch.get_rng_state().nbytes + outside
        if self.is_together or not self.setup.num_norms:
            return outside
        shape = 2, self.source.longest
        more = self.probe(*[self.source.micro_batch(shape)] * 3).peak - self.peak(shape)
        return more + (NORM_BYTES * self.setup.num_norms if outside else 0)

    def outside(self) -> tuple[int, int]:
        """Bytes outside torch's allocator: those of one graph, and those of each micro-batch."""
        if self.setup.device.type != "cpu":
            return 0, 0
        graph = NODE_BYTES * self.probe.num_nodes
        if self.setup.is_exact:
            return 0, graph + self.setup.outside_each
        norms = 0 if self.is_together else NORM_BYTES * self.setup.num_norms
        return graph - 2 * norms, self.setup.outside_each + norms

    def peak(self, shape: PassShape) -> int:
        """The peak of an update in micro-batches of this shape, tried once."""
        if shape not in self.tried:
            self.timeline(shape)
        return self.tried[shape]

    def timeline(self, shape: PassShape) -> Timeline:
        """An update in micro-batches of this shape: two of them, or as many as the batch has if they meet."""
        if shape in self.seen:
            return self.seen[shape]
        parts = self._cut(shape)
        self.seen[shape] = timeline = self.probe(*parts)
        self.tried[shape] = timeline.peak
        if self.is_fake and self.setup.is_coupled:  # no op makes a random state
            self.tried[shape] += torch.get_rng_state().nbytes * len(parts)
        if self.probe is self.fake:
            self.kinds[shape] = self.fake.recorder.moments()
        return timeline

    def fake_peak(
        self, shape: PassShape, *, is_whole: bool = False, is_known: bool = True
    ) -> tuple[int, Moments] | None:
        """The peak that fake tensors show, and what memory is made of; None where they cannot run.

        With `is_known` False it is tried anew, for a model that has changed since.
        """
        if self.fake is None:
            return None
        if is_known and not is_whole and shape in self.kinds:
            return self.tried[shape], self.kinds[shape]
        parts = (self.source.micro_batch(shape),) if is_whole else self._cut(shape)
        return self.fake(*parts).peak, self.fake.recorder.moments()

    def _cut(self, shape: PassShape) -> tuple[Batch, ...]:
        if self.is_together:
            return self.source.all_rows(shape[0])
        micro_batch = self.source.micro_batch(shape)
        return micro_batch, micro_batch

    def envelope(self, shapes: Sequence[PassShape], needed: Sequence[PassShape] = ()) -> Envelope | None:
        """The peak of all shapes, from timelines of these; None where ops differ or the batch has to be tried whole."""
        return None if self.is_together else fit_envelope(shapes, [self.timeline(shape) for shape in shapes], needed)

    def whole(self) -> int:
        """The peak of the whole batch in one piece, tried."""
        return self.probe(self.source.micro_batch((self.source.num_rows, self.source.longest))).peak

    @property
    def standing(self) -> int:
        """Bytes that no micro-batch, however small, does without: weights, buffers, the optimizer's state, the batch."""
        model, optimizer, _ = self.probe.parts
        state = [] if optimizer is None else optimizer_tensors(optimizer)
        return bytes_of([*model.parameters(), *model.buffers(), *state]) + self.setup.batch_bytes


def start_trials(setup: TrialSetup, source: MicroBatchSource, undo: ExitStack) -> Trials:
    """Fake tensors if they can run and see what kernels allocate; else real steps, in place, which `undo` undoes."""
    is_together = _meets(setup)
    first = source.micro_batch((2, source.longest))
    fake, failure = None, ""
    try:
        fake = FakeProbe(setup, first)
        timeline = fake(first, first)
    except PlanError:
        raise
    except Exception as error:  # whatever a model does that needs numbers
        fake, failure = None, f"fake tensors could not run this update ({first_line(error)})"
    hidden = fake.hidden if fake is not None and setup.device.type == "cpu" else None
    if fake is not None and hidden is None:
        seen = {} if is_together else {(2, source.longest): (timeline, fake.recorder.moments())}
        return Trials(
            setup,
            source,
            fake,
            fake,
            "fake tensors",
            "every op of the update could run on them",
            is_together,
            tried={shape: timeline.peak for shape, (timeline, _) in seen.items()},
            kinds={shape: kinds for shape, (_, kinds) in seen.items()},
            seen={shape: timeline for shape, (timeline, _) in seen.items()},
        )
    why_not = _why_not_real(setup, source)
    if why_not is None:
        reason = failure or f"the CPU's kernels for {hidden} allocate memory that fake tensors do not show"
        return Trials(setup, source, RealProbe(setup, undo), fake, "real steps", reason, is_together)
    if fake is None:
        raise PlanError(f"the memory of this update cannot be predicted: {failure}, and {why_not}.")
    reason = f"{why_not}, though the CPU's kernels for {hidden} allocate some 3 to 30 % more than fake tensors show"
    return Trials(setup, source, fake, fake, "fake tensors", reason, is_together)


def _meets(setup: TrialSetup) -> bool:
    """Whether what all micro-batches left meets before the step: coupled losses, layers in lockstep, and sparse gradients,
    those of all rows standing side by side until they are joined.
    """
    is_sparse = any(getattr(module, "sparse", False) is True for module in setup.parts[0].modules())
    return setup.is_coupled or is_sparse or setup.is_exact


def _why_not_real(setup: TrialSetup, source: MicroBatchSource) -> str | None:
    if not is_real(setup.parts, source.batch):
        return "a real step needs a model and a batch that hold numbers"
    if setup.device.type == "cuda" and not torch.cuda.is_available():
        return f"there is no {setup.device} here for a real step"
    if setup.is_exact:
        return "batch_norm='exact' runs in threads, whose allocations the profiler does not see in a real step"
    return None


def available_bytes(device: torch.device) -> int:
    """What could still be allocated there now, in bytes. Garbage is collected first: it is free, and not yet counted so."""
    gc.collect()
    free = free_bytes(device)
    if free is not None:
        return free
    if device.type == "cpu":
        raise PlanError(
            'memory=None: this system does not tell how much memory is free. Give memory="6GiB", or whatever there is.'
        )
    raise PlanError(
        f'memory=None asks what {device} has free, but it cannot be asked here. Give memory="24GiB", or whatever the card has.'
    )


def notes_for(trials: Trials, *, bucket_bytes: int = 0) -> tuple[str, ...]:
    """Where this plan may be off, and by what."""
    setup, notes = trials.setup, []
    if bucket_bytes:
        notes.append(
            f"DistributedDataParallel keeps {show_bytes(bucket_bytes)} of buckets beside the gradients: they are taken off the "
            "memory, and not counted in peaks."
        )
    if setup.device.type != "cpu" and trials.method == "fake tensors":
        notes += _notes_of_gpu(trials)
    has_norms = any(isinstance(module, BatchNormLayer) for module in setup.parts[0].modules())
    if has_norms and setup.running.batch_norm == "exact" and setup.running.offload is not None:
        notes.append("What batch_norm='exact' moves to the host or to disk is counted as if it stayed: an upper bound.")
    if setup.running.prefetch and setup.is_elsewhere:
        notes.append("prefetch=True has the inputs of two micro-batches on the device at a time; one is counted.")
    if trials.is_together:
        notes.append("Micro-batches do not stand alone in this update, so each size was tried with the whole batch.")
    return tuple(notes)


def _notes_of_gpu(trials: Trials) -> list[str]:
    setup = trials.setup
    notes = [
        f"On {setup.device} not counted: the context (0.3 to 1 GiB outside of torch's allocator), workspaces of cuBLAS and "
        "cuDNN, and what the caching allocator rounds up and leaves in pieces."
    ]
    ops = trials.fake.recorder.ops if trials.fake is not None else ()
    if any("scaled_dot_product" in op for op in ops):
        notes.append(
            "Attention was followed through the CPU's kernel, which keeps no matrix of rows x heads x length x length; a GPU "
            "that has to fall back from its flash and memory-efficient kernels keeps one."
        )
    if setup.running.autocast is not None:
        notes.append("Autocast was followed with the CPU's list of ops, which differs from a GPU's in a few.")
    optimizer = setup.parts[1]
    if optimizer is not None and any(group.get("foreach", False) is None for group in optimizer.param_groups):
        notes.append("The optimizer was stepped over all parameters at once (foreach), as torch does on a GPU.")
    return notes

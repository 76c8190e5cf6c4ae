"""Try micro-batch sizes and find the largest that fits."""

import gc
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch

from anybatch.core import Batch, free_bytes, map_tensors, num_rows, take_rows, tensors
from anybatch.errors import MemoryLimitError, PlanError, first_line
from anybatch.memory.envelope import Envelope, PassShape, Peaks, fit_envelope, largest_below
from anybatch.memory.meter import bytes_of, optimizer_tensors
from anybatch.memory.probe import NODE_BYTES, NORM_BYTES, FakeProbe, RealProbe, TrialSetup, is_real
from anybatch.memory.recorder import Moments, Timeline
from anybatch.ragged import RowLengths, Tokens, narrow, padded_dims

Method = Literal["fake tensors", "real steps"]
SHORTEST = 4  # shorter rows are planned as if all had the longest's length: a curve needs three lengths
MOST_OFF = 0.001  # largest relative error of the envelope at the chosen size; above it, sizes are tried one by one
MOST_LENGTHS = 32  # row lengths that a budget is checked for, the longest among them
LEAST_SLACK = 0.02  # smallest relative error to expect of the next real size; more if the last one was farther off
GROWTH = 4  # largest ratio of two real sizes in a row, because CPU kernels change with size
WORTH_TRYING = 1.05  # smallest ratio of two real sizes in a row


@dataclass(frozen=True, slots=True)
class MicroBatchSource:
    """A batch to take micro-batches from; its rows repeat if there are too few."""

    batch: Batch
    num_rows: int
    row_length: int | None = None  # length of the longest row, if sizes are in tokens
    lengths: RowLengths | None = None  # lengths of rows, if they differ

    @property
    def row_size(self) -> int:
        return self.row_length or 1

    @property
    def longest(self) -> int | None:
        """Largest length of a row; None if lengths do not vary."""
        return None if self.lengths is None else self.row_length

    @property
    def nbytes(self) -> int:
        """Bytes of the batch during an update. Splitting ragged rows copies everything but the padding."""
        whole = bytes_of(tensors(self.batch))
        if self.lengths is None:
            return whole
        return whole + round(whole * sum(self.lengths.lengths) / (self.num_rows * self.lengths.width))

    def micro_batch(self, shape: PassShape) -> Batch:
        """Take rows of the batch, truncated to a length if there is one."""
        rows, length = shape
        chosen = slice(0, rows) if rows <= self.num_rows else torch.arange(rows) % self.num_rows
        taken = take_rows(self.batch, chosen)
        if length is None or self.lengths is None:
            return taken
        trimmed = narrow(taken, slice(0, length), self.lengths.dims)
        return map_tensors(trimmed, torch.Tensor.contiguous)  # as the split makes them


def micro_batch_source_of(batch: Batch, tokens: Tokens | None) -> MicroBatchSource:
    if tokens is None:
        return MicroBatchSource(batch, num_rows(batch))
    lengths = tokens.measure(batch)
    if tokens.collate is not None:
        batch = tokens.collate(list(batch))
        width = next((tensor.shape[1] for tensor in tensors(batch) if tensor.dim() > 1), lengths.width)
        dims = padded_dims(batch, width=width, count=num_rows(batch))
        lengths = RowLengths(lengths=lengths.lengths, width=width, dims=dims)
    count, longest = num_rows(batch), max(lengths.lengths)
    if min(lengths.lengths) < longest and longest >= SHORTEST:
        return MicroBatchSource(batch, count, longest, lengths)
    return MicroBatchSource(narrow(batch, lengths.columns(longest), lengths.dims), count, longest)


@dataclass
class Trials:
    """Trial updates and their peaks."""

    setup: TrialSetup
    source: MicroBatchSource
    probe: FakeProbe | RealProbe
    fake: FakeProbe | None  # probe on fake tensors, for the breakdown of a peak; None if they cannot run
    reason: str  # why this probe is used
    needs_whole_batch: bool  # True if micro-batches depend on each other: each size is tried with the whole batch
    tried: dict[PassShape, int] = field(default_factory=dict)
    timelines: dict[PassShape, Timeline] = field(default_factory=dict)

    @property
    def method(self) -> Method:
        return "fake tensors" if self.probe is self.fake else "real steps"

    @cached_property
    def smallest(self) -> int:
        """Fewest rows of a micro-batch: 1, or 2 if BatchNorm needs a variance."""
        if self.needs_whole_batch and self.probe is self.fake:
            return 1  # not tried: a whole batch row by row is the slowest fake trial
        try:
            self.peak((1, self.source.longest))
        except ValueError:
            return 2
        return 1

    def kept_per_pass(self) -> int:
        """Return the bytes that each further micro-batch keeps until the end of the update.

        These are BatchNorm statistics to merge, the random state for the second forward of a coupled loss, the graph in
        lockstep, and memory outside torch's allocator.
        """
        outside = self.outside()[1]
        if self.setup.is_coupled:
            return torch.get_rng_state().nbytes + outside
        if self.needs_whole_batch or not self.setup.num_norms:
            return outside
        shape = 2, self.source.longest
        more = self.probe(*[self.source.micro_batch(shape)] * 3).peak - self.peak(shape)
        return more + (NORM_BYTES * self.setup.num_norms if outside else 0)

    def outside(self) -> tuple[int, int]:
        """Return the bytes outside torch's allocator: of one graph, and of each micro-batch."""
        if self.setup.device.type != "cpu":
            return 0, 0
        graph = NODE_BYTES * self.probe.num_nodes
        if self.setup.is_exact:
            return 0, graph + self.setup.outside_each
        norms = 0 if self.needs_whole_batch else NORM_BYTES * self.setup.num_norms
        return graph - 2 * norms, self.setup.outside_each + norms

    def peak(self, shape: PassShape) -> int:
        """Return the peak of an update in micro-batches of this shape, tried once."""
        if shape not in self.tried:
            self.timeline(shape)
        return self.tried[shape]

    def timeline(self, shape: PassShape) -> Timeline:
        """Try an update in micro-batches of this shape: two, or the whole batch if `needs_whole_batch`."""
        if shape not in self.timelines:
            parts = self._cut(shape)
            self.timelines[shape] = self.probe(*parts)
            self.tried[shape] = self.timelines[shape].peak
            if self.fake is self.probe and self.setup.is_coupled:  # the random state is made by no op
                self.tried[shape] += torch.get_rng_state().nbytes * len(parts)
        return self.timelines[shape]

    def fake_peak(self, shape: PassShape, *, is_whole: bool) -> tuple[int, Moments] | None:
        """Return the peak and the memory by kind on fake tensors; None if they cannot run."""
        if self.fake is None:
            return None
        parts = (self.source.micro_batch(shape),) if is_whole else self._cut(shape)
        return self.fake(*parts).peak, self.fake.recorder.moments()

    def _cut(self, shape: PassShape) -> tuple[Batch, ...]:
        source, size = self.source, shape[0]
        if self.needs_whole_batch:
            starts = range(0, source.num_rows, size)
            return tuple(take_rows(source.batch, slice(start, start + size)) for start in starts)
        return (source.micro_batch(shape),) * 2

    def whole(self) -> int:
        return self.probe(self.source.micro_batch((self.source.num_rows, self.source.longest))).peak

    def table(self, kept_per_pass: int) -> tuple[tuple[int, int], ...]:
        """Return (size, peak) at full length, less what `Peaks` adds for further micro-batches."""
        source = self.source
        at_length = [(rows, peak) for (rows, length), peak in self.tried.items() if length == source.longest]
        further = {rows: max(-(-source.num_rows // rows) - 2, 0) * self.needs_whole_batch for rows, _ in at_length}
        return tuple(sorted((rows * source.row_size, peak - kept_per_pass * further[rows]) for rows, peak in at_length))


def start_trials(setup: TrialSetup, source: MicroBatchSource, undo: ExitStack) -> Trials:
    """Choose fake tensors if they can run the update and show all memory, else real updates, which `undo` undoes."""
    # sparse gradients of all micro-batches are alive together until the step joins them
    is_sparse = any(getattr(module, "sparse", False) is True for module in setup.parts[0].modules())
    needs_whole_batch = setup.is_coupled or is_sparse or setup.is_exact
    shape = 2, source.longest
    first = source.micro_batch(shape)
    fake, failure = None, ""
    try:
        fake = FakeProbe(setup, first)
        timeline = fake(first, first)
    except PlanError:
        raise
    except Exception as error:  # a model that needs data
        fake, failure = None, f"fake tensors could not run this update ({first_line(error)})"
    hidden = fake.hidden_op if fake is not None and setup.device.type == "cpu" else None
    if fake is not None and hidden is None:
        trials = Trials(setup, source, fake, fake, "every op of the update could run on them", needs_whole_batch)
        if not needs_whole_batch:
            trials.timelines[shape], trials.tried[shape] = timeline, timeline.peak
        return trials
    why_not = _why_not_real(setup, source)
    if why_not is None:
        reason = failure or f"the CPU's kernels for {hidden} allocate memory that fake tensors do not show"
        return Trials(setup, source, RealProbe(setup, undo), fake, reason, needs_whole_batch)
    if fake is None:
        raise PlanError(f"the memory of this update cannot be predicted: {failure}, and {why_not}.")
    reason = f"{why_not}, though the CPU's kernels for {hidden} allocate some 3 to 30 % more than fake tensors show"
    return Trials(setup, source, fake, fake, reason, needs_whole_batch)


def _why_not_real(setup: TrialSetup, source: MicroBatchSource) -> str | None:
    if not is_real(setup.parts, source.batch):
        return "a real step needs a model and a batch that hold numbers"
    if setup.device.type == "cuda" and not torch.cuda.is_available():
        return f"there is no {setup.device} here for a real step"
    if setup.is_exact:
        return "batch_norm='exact' runs in threads, whose allocations the profiler does not see in a real step"
    return None


def available_bytes(device: torch.device) -> int:
    gc.collect()  # garbage counts as free
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestFitting:
    """Result of the search, in rows or tokens."""

    size: int  # 0 if nothing fits
    shape: PassShape  # largest micro-batch of that size, or of the smallest size if nothing fits
    peak: int
    whole: int
    least: int
    is_whole: bool
    is_confirmed: bool
    peaks: Peaks


def find_largest_fitting(trials: Trials, limit: int) -> LargestFitting:
    source = trials.source
    size, whole, peaks = (_by_fake_steps if trials.method == "fake tensors" else _by_real_steps)(trials, limit)
    is_whole, smallest = whole <= limit, trials.smallest * source.row_size
    rows, length = (source.num_rows, None) if is_whole else peaks.worst(size or smallest)
    shape = rows, length or source.longest
    return LargestFitting(
        size=size,
        shape=shape,
        peak=whole if is_whole else peaks.peak(size or smallest),
        whole=whole,
        least=peaks.least(smallest),
        is_whole=is_whole,
        is_confirmed=is_whole or shape in trials.tried,
        peaks=peaks,
    )


def _by_fake_steps(trials: Trials, limit: int) -> tuple[int, int, Peaks]:
    """Return the size, the peak of the whole batch, and the peaks of all sizes."""
    source, peaks = trials.source, _predict(trials)
    whole, smallest = trials.whole(), trials.smallest * source.row_size
    if whole <= limit:
        if not _holds(trials, peaks, source.num_rows // 2 * source.row_size):
            for parts in (2, 8, 32):  # micro-batches of the whole batch, as points of the curve
                trials.peak((max(source.num_rows // parts, trials.smallest), source.longest))
            peaks = _without_envelope(trials, peaks)
        return source.num_rows * source.row_size, whole, peaks
    if peaks.envelope is not None:
        size = peaks.largest(limit, smallest, max(source.num_rows * source.row_size - 1, smallest))
        if not size or _holds(trials, peaks, size):
            return size, whole, peaks

    def peak(rows: int) -> int:
        return trials.peak((max(rows, trials.smallest), source.longest))

    rows = largest_below(limit, peak, source.num_rows - 1)  # trials take no memory
    size = max(rows, trials.smallest) * source.row_size if rows else 0
    return size, whole, _without_envelope(trials, peaks)


def _predict(trials: Trials) -> Peaks:
    """Fit an envelope to two numbers of rows, and three lengths if they differ."""
    source, few = trials.source, (2, 3)
    lengths: tuple[int, ...] = ()
    tried: tuple[tuple[int, int], ...] = ()
    shapes: list[PassShape] = [(rows, None) for rows in few]
    needed: list[PassShape] = []
    if source.lengths is not None:
        lengths = _some_of(sorted(set(source.lengths.lengths)))
        three = (source.row_size // 4, source.row_size // 2, source.row_size)
        shapes = [(rows, length) for rows in few for length in three]
        powers = [2**power for power in range(source.num_rows.bit_length())]
        needed = [(rows, length) for rows in powers for length in lengths]
    envelope = None  # if each size is tried with the whole batch
    if not trials.needs_whole_batch:
        envelope = fit_envelope(shapes, [trials.timeline(shape) for shape in shapes], needed)
    if envelope is not None and not lengths:  # a single row runs other ops
        tried = ((trials.smallest * source.row_size, trials.peak((trials.smallest, None))),)
    return replace(_known_peaks(trials, envelope, trials.kept_per_pass()), tried=tried, lengths=lengths)


def _known_peaks(trials: Trials, envelope: Envelope | None, kept_per_pass: int) -> Peaks:
    once, each = trials.outside()
    return Peaks(
        num_rows=trials.source.num_rows,
        tried=trials.table(kept_per_pass),
        envelope=envelope,
        row_length=trials.source.row_size,
        kept_per_pass=kept_per_pass,
        outside_once=once,
        outside_each=each,
    )


def _holds(trials: Trials, peaks: Peaks, size: int) -> bool:
    """Return True if a trial of this size confirms the envelope."""
    if peaks.envelope is None:
        return False
    shape = peaks.worst(size)
    if shape[0] <= trials.smallest:
        return True
    tried = trials.peak(shape)
    return abs(tried - peaks.envelope.peak(shape)) <= MOST_OFF * tried


def _without_envelope(trials: Trials, peaks: Peaks) -> Peaks:
    return replace(peaks, envelope=None, tried=trials.table(peaks.kept_per_pass))


def _some_of(lengths: list[int]) -> tuple[int, ...]:
    if len(lengths) <= MOST_LENGTHS:
        return tuple(lengths)
    step = (len(lengths) - 1) / (MOST_LENGTHS - 1)
    return tuple(sorted({lengths[round(index * step)] for index in range(MOST_LENGTHS)}))


def _by_real_steps(trials: Trials, limit: int) -> tuple[int, int, Peaks]:
    source, found = trials.source, _RealSizes(trials, limit)
    kept_per_pass = trials.kept_per_pass()
    found.climb()
    whole = found.whole()
    if whole > limit:
        found.climb(beyond_half=True)
    peaks = replace(_known_peaks(trials, found.envelope, kept_per_pass), fixed=found.fixed)
    if whole <= limit:
        return source.num_rows * source.row_size, whole, peaks
    return peaks.largest(limit, trials.smallest * source.row_size, found.largest * source.row_size), whole, peaks


class _RealSizes:
    """Tries growing sizes by real updates, each only if the line through the last two predicts that it fits.

    After one size, memory beyond `fixed` is assumed to grow in proportion to the rows.
    """

    def __init__(self, trials: Trials, limit: int) -> None:
        self._trials = trials
        self._sizes = [trials.smallest]  # trying it makes the optimizer's state
        model, optimizer, _ = trials.probe.parts
        learning = bytes_of(one for one in model.parameters() if one.requires_grad)
        standing = bytes_of([*model.parameters(), *model.buffers(), *optimizer_tensors(optimizer)])
        self.fixed = standing + trials.setup.batch_bytes + learning
        self._given_limit = limit
        self._limit = min(limit, self.fixed + int(0.9 * available_bytes(trials.setup.device)))
        self._failed = 0  # fewest rows that ran out of memory; 0 if none did
        self._too_many = 0  # rows of a trial above the limit; 0 if there was none
        self._slack = LEAST_SLACK

    @property
    def largest(self) -> int:
        return max(self._sizes[-1], self._too_many)

    @property
    def envelope(self) -> Envelope | None:
        """Prediction for larger sizes; None if the last two trials ran different ops."""
        if self._trials.needs_whole_batch:
            return None
        return self._line_through([self._trials.timeline(self._shape(rows)) for rows in self._sizes[-2:]])

    def climb(self, *, beyond_half: bool = False) -> None:
        """Try growing sizes while they fit: up to half of the batch, or beyond it if the whole batch does not fit."""
        while (following := self._following(beyond_half=beyond_half)) >= WORTH_TRYING * self._sizes[-1]:
            expected = self._expected(following)
            try:
                peak = self._trials.peak(self._shape(following))
            except (MemoryLimitError, MemoryError):
                self._failed = following
                continue
            if peak > self._limit:
                self._too_many = following
                break
            if len(self._sizes) > 1:
                self._slack = max(LEAST_SLACK, peak / expected - 1)
            self._sizes.append(following)

    def whole(self) -> int:
        """Return the peak of the whole batch: tried if it is expected to fit, else a value above the limit."""
        trials, count = self._trials, self._trials.source.num_rows
        if trials.needs_whole_batch:
            expected = self._expected(count)
        else:
            pieces = [trials.probe(trials.source.micro_batch(self._shape(rows))) for rows in self._sizes[-2:]]
            line = self._line_through(pieces)
            grown = self.fixed + (pieces[-1].peak - self.fixed) * count / self._sizes[-1]
            expected = grown if line is None else line.peak((count, None))
        if not self._failed and expected * (1 + self._slack) <= self._limit:
            with suppress(MemoryLimitError, MemoryError):
                return trials.whole()
        return max(round(expected * (1 + self._slack)), self._given_limit + 1)

    def _following(self, *, beyond_half: bool) -> int:
        """Return the next size to try; half of the batch is enough if all but one row are predicted to fit."""
        last, count = self._sizes[-1], self._trials.source.num_rows
        slack = self._slack if len(self._sizes) > 1 else 0.0

        def at_most(rows: int) -> float:
            return round(self._expected(rows) * (1 + slack) if rows > last else self._expected(last))

        bound = largest_below(self._limit, at_most, count - 1)
        is_half_enough = bound == count - 1 and not beyond_half
        following = min(GROWTH * last, count // 2 if is_half_enough else bound)
        return min(following, (last + self._failed) // 2) if self._failed else following

    def _expected(self, rows: int) -> float:
        """Predict a peak by the envelope, the line through the last two peaks, or in proportion to the only one."""
        envelope = self.envelope
        if envelope is not None:
            return envelope.peak((rows, None))
        last = self._sizes[-1]
        peaks = [self._trials.peak(self._shape(size)) for size in self._sizes[-2:]]
        if len(peaks) < 2:
            return self.fixed + (peaks[0] - self.fixed) * rows / last
        return peaks[1] + (peaks[1] - peaks[0]) * (rows - last) / (last - self._sizes[-2])

    def _line_through(self, timelines: list[Timeline]) -> Envelope | None:
        shapes: list[PassShape] = [(rows, None) for rows in self._sizes[-2:]]
        return fit_envelope(shapes, timelines) if len(shapes) == 2 else None

    def _shape(self, rows: int) -> PassShape:
        return rows, self._trials.source.longest

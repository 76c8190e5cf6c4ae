"""The largest size that fits: read off the envelope and confirmed, or found by trying."""

from contextlib import suppress
from dataclasses import dataclass, replace

from anybatch.errors import MemoryLimitError
from anybatch.memory.envelope import Envelope, PassShape, Peaks, fit_envelope, largest_below
from anybatch.memory.meter import bytes_of
from anybatch.memory.trials import Trials, available_bytes

MOST_OFF = 0.001
"""How far the size chosen may be from its prediction when it is tried; if farther, sizes are tried one by one."""
MOST_LENGTHS = 32
"""A budget is checked for this many row lengths at most, picked evenly, the longest among them."""
LEAST_SLACK = 0.02
"""How far above its line the next real size is held to be possible, at least; more where the last one was farther off."""
GROWTH = 4
"""The next real size is at most so many times the last one: kernels of the CPU change with size."""
WORTH_TRYING = 1.05
"""How much larger a real size has to be to be tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestFitting:
    """Result of the search; sizes are rows or tokens."""

    size: int
    """0 where nothing fits."""
    shape: PassShape
    """The largest micro-batch of that size; where nothing fits, of the smallest size."""
    peak: int
    whole: int
    least: int
    is_whole: bool
    is_confirmed: bool
    peaks: Peaks


def find_largest_fitting(trials: Trials, limit: int) -> LargestFitting:
    """The largest size that fits into `limit` bytes."""
    return _by_fake_steps(trials, limit) if trials.is_fake else _by_real_steps(trials, limit)


def _by_fake_steps(trials: Trials, limit: int) -> LargestFitting:
    source, peaks = trials.source, _predict(trials)
    one = source.row_length or 1
    whole, smallest = trials.whole(), trials.smallest * one
    if whole <= limit:
        if peaks.envelope is None or not _holds(trials, peaks, source.num_rows // 2 * one):
            for parts in (2, 8, 32):  # the whole batch in so many micro-batches, for the curve
                trials.peak((max(source.num_rows // parts, trials.smallest), source.longest))
            peaks = _without_envelope(trials, peaks)
        return LargestFitting(
            size=source.num_rows * one,
            shape=(source.num_rows, source.longest),
            peak=whole,
            whole=whole,
            least=_least(peaks, smallest),
            is_whole=True,
            is_confirmed=True,
            peaks=peaks,
        )
    size = 0
    if peaks.envelope is not None:
        size = _largest_of(peaks, limit, smallest, max(source.num_rows * one - 1, smallest))
        if size and not _holds(trials, peaks, size):
            peaks = _without_envelope(trials, peaks)
    if peaks.envelope is None:  # by trying, which costs no memory
        rows = largest_below(
            limit, lambda rows: trials.peak((max(rows, trials.smallest), source.longest)), source.num_rows - 1
        )
        size = (max(rows, trials.smallest) if rows else 0) * one
        peaks = _without_envelope(trials, peaks)
    shape = peaks.worst(size or smallest)
    return LargestFitting(
        size=size,
        shape=shape,
        peak=peaks.peak(size or smallest),
        whole=whole,
        least=_least(peaks, smallest),
        is_whole=False,
        is_confirmed=shape in trials.tried,
        peaks=peaks,
    )


def _predict(trials: Trials) -> Peaks:
    """An envelope from two numbers of rows, and three lengths where they differ."""
    source, few = trials.source, (2, 3)
    lengths: tuple[int, ...] = ()
    tried: tuple[tuple[int, int], ...] = ()
    if source.lengths is None or source.row_length is None:
        envelope = trials.envelope([(rows, None) for rows in few])
        if envelope is not None:  # a single row runs other ops
            tried = ((trials.smallest * (source.row_length or 1), trials.peak((trials.smallest, None))),)
    else:
        lengths = _some_of(sorted(set(source.lengths.lengths)))
        three = (source.row_length // 4, source.row_length // 2, source.row_length)
        needed: list[PassShape] = [
            (2**power, length) for power in range(source.num_rows.bit_length()) for length in lengths
        ]
        envelope = trials.envelope([(rows, length) for rows in few for length in three], needed)
    return Peaks(
        num_rows=source.num_rows,
        tried=tried,
        envelope=envelope,
        lengths=lengths,
        row_length=source.row_length or 1,
        left_behind=trials.left_behind(),
        outside_once=trials.outside()[0],
        outside_each=trials.outside()[1],
    )


def _largest_of(peaks: Peaks, limit: int, smallest: int, most: int) -> int:
    """The largest size up to `most` whose prediction fits; 0 if none does.

    What each micro-batch leaves makes the smallest sizes larger than those after them: the last power of two that fits begins.
    """
    one = 1 if peaks.lengths else peaks.row_length
    powers = [smallest * 2**power for power in range((most // smallest).bit_length())]
    start = max((size for size in powers if peaks.peak(size) <= limit), default=0)
    steps = (min(2 * start - 1, most) - start) // one
    return start + one * largest_below(limit, lambda step: peaks.peak(start + step * one), steps) if start else 0


def _least(peaks: Peaks, smallest: int) -> int:
    """The lowest peak; of a small model that is not always the smallest size, because every micro-batch leaves something."""
    whole = peaks.num_rows * peaks.row_length
    return min(peaks.peak(smallest * 2**power) for power in range((whole // smallest).bit_length()))


def _holds(trials: Trials, peaks: Peaks, size: int) -> bool:
    """True if a trial of the size chosen gives what was predicted."""
    shape = peaks.worst(size)
    if peaks.envelope is None or shape[0] <= trials.smallest:
        return True
    tried = trials.peak(shape)
    return abs(tried - peaks.envelope.peak(shape)) <= MOST_OFF * tried


def _without_envelope(trials: Trials, peaks: Peaks) -> Peaks:
    """Only the sizes that were tried at full length."""
    return replace(peaks, envelope=None, tried=_tried(trials, peaks.row_length, peaks.left_behind))


def _tried(trials: Trials, one: int, left_behind: int) -> tuple[tuple[int, int], ...]:
    """Sizes and peaks, less what `Peaks` adds for each further micro-batch where all of them ran."""
    further = {rows: max(-(-trials.source.num_rows // rows) - 2, 0) * trials.is_together for rows, _ in trials.tried}
    at_length = [(rows, peak) for (rows, length), peak in trials.tried.items() if length == trials.source.longest]
    return tuple(sorted((rows * one, peak - left_behind * further[rows]) for rows, peak in at_length))


def _some_of(lengths: list[int]) -> tuple[int, ...]:
    if len(lengths) <= MOST_LENGTHS:
        return tuple(lengths)
    step = (len(lengths) - 1) / (MOST_LENGTHS - 1)
    return tuple(sorted({lengths[round(index * step)] for index in range(MOST_LENGTHS)}))


def _by_real_steps(trials: Trials, limit: int) -> LargestFitting:
    source, one = trials.source, trials.source.row_length or 1
    found = _RealSizes(trials, limit)
    found.climb()
    whole, is_tried = found.whole()
    is_whole = whole <= limit
    if not is_whole:
        found.climb(beyond_half=True)
    peaks = Peaks(
        num_rows=source.num_rows,
        tried=_tried(trials, one, found.left_behind),
        envelope=found.envelope,
        row_length=one,
        left_behind=found.left_behind,
        outside_once=trials.outside()[0],
        outside_each=trials.outside()[1],
        fixed=found.fixed,
    )
    smallest = trials.smallest * one
    size = source.num_rows * one if is_whole else _largest_of(peaks, limit, smallest, found.largest * one)
    shape: PassShape = (max(size // one, trials.smallest), source.longest)
    return LargestFitting(
        size=size,
        shape=shape,
        peak=whole if is_whole else peaks.peak(size or smallest),
        whole=whole,
        least=_least(peaks, smallest),
        is_whole=is_whole,
        is_confirmed=is_tried if is_whole else shape in trials.tried,
        peaks=peaks,
    )


class _RealSizes:
    """The peaks of growing sizes, each tried by a real step only where the line through the last two says that it fits.

    Of one size alone nothing is known but that what an op has beside weights, state and gradients grows no faster than rows.
    """

    def __init__(self, trials: Trials, limit: int) -> None:
        self._trials = trials
        self._longest = trials.source.longest
        self._sizes = [trials.smallest]  # trying it makes the optimizer's state
        self.fixed = trials.standing + bytes_of(one for one in trials.probe.parts[0].parameters() if one.requires_grad)
        self._above = limit + 1
        self._limit = min(limit, self.fixed + int(0.9 * available_bytes(trials.setup.device)))
        self._failed = 0
        """The fewest rows that memory ran out with; 0 where it did not."""
        self._too_many = 0
        """Rows that were tried, and were above the limit after all; 0 where there were none."""
        self._slack = LEAST_SLACK
        self.left_behind = trials.left_behind()

    @property
    def largest(self) -> int:
        """The most rows that were tried."""
        return max(self._sizes[-1], self._too_many)

    def climb(self, *, beyond_half: bool = False) -> None:
        """Try sizes for as long as they fit, short of the whole batch: up to half of it, or where it must be cut, beyond."""
        while (following := self._following(beyond_half=beyond_half)) >= WORTH_TRYING * self._sizes[-1]:
            expected = self._line(following)
            try:
                peak = self._peak(following)
            except (MemoryLimitError, MemoryError):  # of the trial, or of the meter
                self._failed = following
                continue
            if peak > self._limit:
                self._too_many = following
                break
            if len(self._sizes) > 1:
                self._slack = max(LEAST_SLACK, peak / expected - 1)
            self._sizes.append(following)

    def whole(self) -> tuple[int, bool]:
        """The peak of the whole batch in one piece, and whether it was tried: only where it is expected to fit."""
        trials, count = self._trials, self._trials.source.num_rows
        if trials.is_together:
            expected = self._line(count)
        else:
            pieces = [trials.probe(trials.source.micro_batch((rows, self._longest))) for rows in self._sizes[-2:]]
            line = fit_envelope([(rows, None) for rows in self._sizes[-2:]], pieces) if len(pieces) == 2 else None
            grown = self.fixed + (pieces[-1].peak - self.fixed) * count / self._sizes[-1]
            expected = grown if line is None else line.peak((count, None))
        if not self._failed and expected * (1 + self._slack) <= self._limit:
            with suppress(MemoryLimitError, MemoryError):
                return trials.whole(), True
        return max(round(expected * (1 + self._slack)), self._above), False

    @property
    def envelope(self) -> Envelope | None:
        """For sizes beyond those that were tried; None where the last two ran in other steps."""
        if len(self._sizes) < 2 or self._trials.is_together:
            return None
        shapes: list[PassShape] = [(rows, None) for rows in self._sizes[-2:]]
        return fit_envelope(shapes, [self._trials.timeline((rows, self._longest)) for rows in self._sizes[-2:]])

    def _following(self, *, beyond_half: bool) -> int:
        """The next size to try; where even one row less than the batch fits, the whole of it is tried after halves."""
        last, count = self._sizes[-1], self._trials.source.num_rows
        bound = largest_below(self._limit, lambda rows: round(self._at_most(max(rows, last))), count - 1)
        is_half_enough = bound == count - 1 and not beyond_half
        following = min(GROWTH * last, count // 2 if is_half_enough else bound)
        return min(following, (last + self._failed) // 2) if self._failed else following

    def _peak(self, rows: int) -> int:
        return self._trials.peak((rows, self._longest))

    def _at_most(self, rows: int) -> float:
        """Upper bound for a number of rows that is not tried yet."""
        slack = self._slack if rows > self._sizes[-1] else 0.0
        return self._line(rows) * (1 + slack) if len(self._sizes) > 1 else self._grown(rows)

    def _line(self, rows: int) -> float:
        envelope = self.envelope
        if envelope is not None:
            return envelope.peak((rows, None))
        if len(self._sizes) < 2:
            return self._grown(rows)
        few, more = self._sizes[-2:]
        return self._peak(more) + (self._peak(more) - self._peak(few)) * (rows - more) / (more - few)

    def _grown(self, rows: int) -> float:
        last = self._sizes[-1]
        return self.fixed + (self._peak(last) - self.fixed) * rows / last

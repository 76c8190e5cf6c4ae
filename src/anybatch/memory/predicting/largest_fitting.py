"""The largest size that fits: read off the envelope and confirmed, or found by trying."""

from dataclasses import dataclass, field, replace

from anybatch.memory.predicting.envelope import PassShape, largest_below
from anybatch.memory.predicting.peaks import Peaks
from anybatch.memory.predicting.real_sizes import RealSizes
from anybatch.memory.predicting.trials import Trials
from anybatch.memory.tracing import KeptMemory

MOST_OFF = 0.001
"""How far the size chosen may be from its prediction when it is tried; if farther, sizes are tried one by one."""
MOST_LENGTHS = 32
"""A budget is checked for this many row lengths at most, picked evenly, the longest among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestFitting:
    """What the search ended with; sizes are rows or tokens."""

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
    kept: KeptMemory = field(default_factory=KeptMemory)
    """What trials leave in this process beside tensors."""


def find_largest_fitting(trials: Trials, limit: int) -> LargestFitting:
    """The largest size that fits into `limit` bytes."""
    return _by_fake_steps(trials, limit) if trials.is_fake else _by_real_steps(trials, limit)


def _by_real_steps(trials: Trials, limit: int) -> LargestFitting:
    source, one = trials.source, trials.source.row_length or 1
    found = RealSizes(trials, limit)
    found.climb()
    whole, is_tried = found.whole()
    if whole > limit:
        found.climb(beyond_half=True)
    peaks = Peaks(
        num_rows=source.num_rows,
        tried=_tried(trials, one, found.left_behind),
        envelope=found.envelope,
        row_length=one,
        left_behind=found.left_behind,
        outside_once=trials.outside()[0],
        outside_each=trials.outside()[1],
        batch_bytes=trials.setup.batch_bytes,
        is_together=trials.is_together,
        fixed=found.fixed,
        check=trials.setup.check,
    )
    whole = peaks.with_check(whole, source.num_rows // 2 * one)
    is_whole = whole <= limit
    smallest = trials.smallest * one
    size = source.num_rows * one if is_whole else largest_of(peaks, limit, smallest, found.largest * one)
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
        kept=found.kept,
    )


def _by_fake_steps(trials: Trials, limit: int) -> LargestFitting:
    source, peaks = trials.source, _predict(trials)
    whole = _whole(trials, peaks)
    smallest = trials.smallest * (source.row_length or 1)
    most = max(source.num_rows * (source.row_length or 1) - 1, smallest)
    if whole <= limit:
        if peaks.envelope is None or not _holds(trials, peaks, source.num_rows // 2 * (source.row_length or 1)):
            for parts in (2, 8, 32):  # the whole batch in so many micro-batches, for the curve
                trials.peak((max(source.num_rows // parts, trials.smallest), source.longest))
            peaks = _without_envelope(trials, peaks)
        size, shape, peak = source.num_rows * (source.row_length or 1), (source.num_rows, source.longest), whole
        is_confirmed = True
    else:
        size = 0 if peaks.envelope is None else largest_of(peaks, limit, smallest, most)
        if peaks.envelope is not None and size and not _holds(trials, peaks, size):
            peaks = _without_envelope(trials, peaks)
        if peaks.envelope is None:
            size = _largest_tried(trials, limit)
            peaks = _without_envelope(trials, peaks)
        shape = peaks.worst(size or smallest)
        peak, is_confirmed = peaks.peak(size or smallest), shape in trials.tried
    return LargestFitting(
        size=size,
        shape=shape,
        peak=peak,
        whole=whole,
        least=_least(peaks, smallest),
        is_whole=whole <= limit,
        is_confirmed=is_confirmed,
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
        batch_bytes=trials.setup.batch_bytes,
        is_together=trials.is_together,
        check=trials.setup.check,
    )


def _whole(trials: Trials, peaks: Peaks) -> int:
    """The peak of the whole batch in one piece, or of the check before it, which looks at rows as for halves."""
    half = trials.source.num_rows // 2
    if peaks.envelope is not None or peaks.check is None:
        return peaks.with_check(trials.whole(), half * (trials.source.row_length or 1))
    return max(trials.whole(), _tried_check(trials, half))


def _tried_check(trials: Trials, rows: int) -> int:
    """The check's peak for micro-batches of so many rows, by trying; 0 where there is none."""
    check = trials.setup.check
    if check is None:
        return 0
    alike = max(min(check.size(rows), trials.source.num_rows), trials.smallest)
    return check.copied + trials.peak((alike, trials.source.longest))


def largest_of(peaks: Peaks, limit: int, smallest: int, most: int) -> int:
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


def _largest_tried(trials: Trials, limit: int) -> int:
    """The largest size, by trying, which costs no memory."""
    source = trials.source

    def tried(rows: int) -> int:
        return max(trials.peak((max(rows, trials.smallest), source.longest)), _tried_check(trials, rows))

    rows = largest_below(limit, tried, source.num_rows - 1)
    return (max(rows, trials.smallest) if rows else 0) * (source.row_length or 1)


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

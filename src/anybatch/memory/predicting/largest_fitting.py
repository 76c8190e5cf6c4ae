"""The largest size that fits: read off the envelope and confirmed, or found by trying."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from anybatch.memory.available import available_bytes
from anybatch.memory.predicting.envelope import PassShape, largest_below
from anybatch.memory.predicting.peaks import Peaks
from anybatch.memory.predicting.trials import Trials

MOST_OFF = 0.001
"""How far the size chosen may be from its prediction when it is tried; if farther, sizes are tried one by one."""
MOST_OFF_REAL = 0.01
"""The same for real steps, whose kernels round."""
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


def find_largest_fitting(trials: Trials, limit: int) -> LargestFitting:
    """The largest size that fits into `limit` bytes."""
    source, whole, peaks = trials.source, trials.whole(limit), _predict(trials)
    smallest = trials.smallest * (source.row_length or 1)
    if whole <= limit:
        if peaks.envelope is None or not _holds(trials, peaks, source.num_rows // 2 * (source.row_length or 1)):
            for parts in (2, 8, 32):  # the whole batch in so many micro-batches, for the curve
                trials.peak((max(source.num_rows // parts, trials.smallest), source.longest))
            peaks = _without_envelope(trials, peaks)
        size, shape, peak = source.num_rows * (source.row_length or 1), (source.num_rows, source.longest), whole
        is_confirmed = True
    else:
        size = _largest(peaks, limit, smallest)
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
        least=peaks.peak(smallest),
        is_whole=whole <= limit,
        is_confirmed=is_confirmed,
        peaks=peaks,
    )


def _predict(trials: Trials) -> Peaks:
    """An envelope from two numbers of rows, and three lengths where they differ."""
    source, few = trials.source, trials.small_sizes
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
    )


def _largest(peaks: Peaks, limit: int, smallest: int) -> int:
    """The largest size whose prediction fits, short of the whole batch; 0 if the smallest does not."""
    if peaks.envelope is None or peaks.peak(smallest) > limit:
        return 0
    one = 1 if peaks.lengths else peaks.row_length
    most = peaks.num_rows * peaks.row_length // one - 1
    return max(one * largest_below(limit, lambda size: peaks.peak(max(size * one, smallest)), most), smallest)


def _holds(trials: Trials, peaks: Peaks, size: int) -> bool:
    """True if a trial of the size chosen gives what was predicted: kernels of the CPU change with size."""
    shape = peaks.worst(size)
    if peaks.envelope is None or shape[0] <= trials.smallest:
        return True
    tried = trials.peak(shape)
    most_off = MOST_OFF if trials.method == "fake tensors" else MOST_OFF_REAL
    return abs(tried - peaks.envelope.peak(shape)) <= most_off * tried


def _largest_tried(trials: Trials, limit: int) -> int:
    """The largest size, by trying: by bisection where it costs no memory, else from small to large."""
    source = trials.source

    def tried(rows: int) -> int:
        return trials.peak((max(rows, trials.smallest), source.longest))

    most = source.num_rows - 1
    if trials.method == "fake tensors":
        rows = largest_below(limit, tried, most)
    else:
        rows = _climb(tried, min(limit, available_bytes(trials.setup.device) // 2), most, trials.standing)
    return (max(rows, trials.smallest) if rows else 0) * (source.row_length or 1)


def _climb(tried: Callable[[int], int], limit: int, most: int, standing: int) -> int:
    """The largest size that fits, by real trials from small to large; none is tried that could need more than `limit`.

    Bytes of an op are linear in the rows and no less than what stands, so the peak is below a line through both.
    """
    size, following = 0, min(1, most)
    while following > size and tried(following) <= limit:
        size = following
        bound = int(size * (limit - standing) / max(tried(size) - standing, 1))
        following = min(2 * size, bound, most)
    return size


def _without_envelope(trials: Trials, peaks: Peaks) -> Peaks:
    """Only the sizes that were tried at full length, less what `peaks` adds for each micro-batch where all of them ran."""
    one, longest, count = peaks.row_length, trials.source.longest, trials.source.num_rows
    further = {rows: max(-(-count // rows) - 2, 0) * trials.is_together for rows, _ in trials.tried}
    tried = [
        (rows * one, peak - peaks.left_behind * further[rows])
        for (rows, length), peak in trials.tried.items()
        if length == longest
    ]
    return replace(peaks, envelope=None, tried=tuple(sorted(tried)))


def _some_of(lengths: list[int]) -> tuple[int, ...]:
    if len(lengths) <= MOST_LENGTHS:
        return tuple(lengths)
    step = (len(lengths) - 1) / (MOST_LENGTHS - 1)
    return tuple(sorted({lengths[round(index * step)] for index in range(MOST_LENGTHS)}))

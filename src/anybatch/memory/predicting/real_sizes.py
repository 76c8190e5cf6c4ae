"""Sizes tried by real steps, from one row upwards: none that could be above the limit."""

import gc
from contextlib import suppress
from functools import partial

from anybatch.batches import tensors
from anybatch.errors import MemoryLimitError
from anybatch.memory.available import available_bytes
from anybatch.memory.predicting.envelope import Envelope, PassShape, fit_envelope, largest_below
from anybatch.memory.predicting.trials import Trials
from anybatch.memory.tracing import KeptMemory, bytes_of, learning_tensors

LEAST_SLACK = 0.02
"""How far above its line the next size is held to be possible, at least; more where the last one was farther off."""
GROWTH = 4
"""The next size is at most so many times the last one: kernels of the CPU change with size."""
WORTH_TRYING = 1.05
"""How much larger a size has to be to be tried."""


class RealSizes:
    """The peaks of growing sizes, each tried only where the line through the last two says that it fits.

    Of one size alone nothing is known but that what an op has beside weights, state and gradients grows no faster than rows.
    """

    def __init__(self, trials: Trials, limit: int) -> None:
        self._trials = trials
        self._longest = trials.source.longest
        self.kept = KeptMemory()
        self._smallest, self._first_left = self._first()
        self.fixed = trials.standing + bytes_of(one for one in trials.probe.parts[0].parameters() if one.requires_grad)
        self._above = limit + 1
        self._failed = 0
        """The fewest rows that memory ran out with; 0 where it did not."""
        self._most = min(limit, self.fixed + int(0.9 * available_bytes(trials.setup.device)))
        self._sizes = [self._smallest]
        self._too_many = 0
        """Rows that were tried, and were above the limit after all; 0 where there were none."""
        self._slack = LEAST_SLACK
        self._beyond_half = False
        self.left_behind = trials.left_behind()

    @property
    def _limit(self) -> int:
        """What the next trial may take, beside what those before it have left."""
        return max(self._most - self.kept.bytes - (self.kept.most_grown or self._first_left), self._most // 2)

    @property
    def largest(self) -> int:
        """The most rows that were tried."""
        return max(self._sizes[-1], self._too_many)

    def climb(self, *, beyond_half: bool = False) -> None:
        """Try sizes for as long as they fit, short of the whole batch: up to half of it, or where it must be cut, beyond."""
        self._beyond_half = beyond_half
        while (following := self._following()) >= WORTH_TRYING * self._sizes[-1]:
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

    def _following(self) -> int:
        """The next size to try; where even one row less than the batch fits, the whole of it is tried after halves."""
        last, count = self._sizes[-1], self._trials.source.num_rows
        bound = largest_below(self._limit, lambda rows: round(self._at_most(max(rows, last))), count - 1)
        is_half_enough = bound == count - 1 and not self._beyond_half
        following = min(GROWTH * last, count // 2 if is_half_enough else bound)
        return min(following, (last + self._failed) // 2) if self._failed else following

    def _first(self) -> tuple[int, int]:
        """The fewest rows, tried, which makes the optimizer's state; and what that left beside tensors.

        Most of it is loaded once for a process and does not count; but of what a new size leaves nothing else is known yet.
        """
        first = KeptMemory()
        self._begin(first)
        smallest = self._trials.smallest
        gc.collect()
        first.look()
        self._begin(self.kept)
        return smallest, first.bytes

    def _begin(self, kept: KeptMemory) -> None:
        trials, (model, optimizer, _) = self._trials, self._trials.probe.parts
        if trials.setup.device.type == "cpu":
            kept.begin(partial(learning_tensors, model, optimizer), tensors(trials.source.batch))

    def _peak(self, rows: int) -> int:
        shape = rows, self._longest
        if shape not in self._trials.tried:
            self._trials.peak(shape)
            gc.collect()  # the profile and its events
            self.kept.look()
        return self._trials.peak(shape)

    def _at_most(self, rows: int) -> float:
        """What this many rows may take, of those that are not tried yet."""
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

"""`Tokens(budget)`: the cheapest cut of a ragged batch."""

import copy
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from anybatch.batches.cost import Cost, Cut, LearnedCost, best_cut
from anybatch.batches.counting import num_rows, take
from anybatch.batches.lengths import RowLengths, given_lengths, masked_lengths, sample_length
from anybatch.batches.nesting import Batch
from anybatch.batches.padding import narrow
from anybatch.batches.splits.by_rows import MicroBatches
from anybatch.errors import SplitError


class Tokens:
    """At most `budget` tokens per micro-batch, padding included, cut so that the whole batch costs least.

    Rows of like length go together, whatever their order in the batch, and each micro-batch is padded to its own longest
    row. Two ways in:

    - a padded batch: a mapping with `attention_mask`, or any batch with `length=`, a function of the batch that returns
      one length per row. Padding is cut off every tensor that carries the padded dimension, but for those named in
      `keep`. Targets equal to `ignored` do not count in the loss; padding that counts is never cut off.
    - raw samples: a list of them (a loader with `collate_fn=list`) and `collate=`, called on the samples of each
      micro-batch; `length=` is then a function of a sample, by default the length of its `input_ids` or first sequence.

    The gradient is the whole padded batch's as long as the model does not look at padding. `cost` is fitted to the times of
    the micro-batches that ran, unless it is given. Up to a share `slack` of it is given up where that halves the largest
    micro-batch, once or more; with 0 the cut is the cheapest there is.

    >>> mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0], [1, 0, 0, 0, 0, 0]])
    >>> cut = Tokens(12, cost=Cost(fixed=6)).cut({"input_ids": mask * 7, "attention_mask": mask})
    >>> [tuple(part["input_ids"].shape) for part in cut], cut.row_numbers
    ([(2, 6), (2, 2)], ((0, 2), (1, 3)))
    """

    def __init__(
        self,
        budget: int,
        *,
        length: Callable[[Any], Any] | None = None,
        collate: Callable[[list[Any]], Batch] | None = None,
        cost: Cost | None = None,
        ignored: int = -100,
        keep: Collection[str] = (),
        slack: float = 0.02,
    ) -> None:
        if isinstance(budget, bool) or not isinstance(budget, int) or budget < 1:
            raise SplitError(
                f"Tokens({budget!r}): the budget must be a whole number of tokens, 1 or more: what one micro-batch may hold, "
                "padding included."
            )
        if not 0 <= slack < 1:
            raise SplitError(f"Tokens(slack={slack!r}): expected a share of the cost, from 0 to below 1, such as 0.01.")
        self.budget = budget
        self.slack = slack
        self.length = length
        self.collate = collate
        self.ignored = ignored
        self.keep = frozenset(keep)
        self._fits: int | None = None
        self._learned = LearnedCost(cost or Cost())
        self._learns = cost is None
        self._has_warned = False

    def __repr__(self) -> str:
        return f"Tokens({self.budget})" if self._fits is None else f"Tokens({self.budget}) shrunk to {self._fits}"

    @property
    def cost(self) -> Cost:
        """The cost that the next batch is cut by: constants in seconds that were fitted, or the ones given."""
        return self._learned.cost

    def cut(self, batch: Batch) -> MicroBatches:
        """The micro-batches of `batch`, longest rows first."""
        rows = self.measure(batch)
        if self._fits is None:
            return self.cut_to(self.budget, batch, rows)
        return self.cut_to(max(self._fits, min(max(rows.lengths), self.budget)), batch, rows)

    def with_budget(self, budget: int) -> "Tokens":
        """The same split under another budget; what is learned is shared."""
        other = copy.copy(self)
        other.budget, other._fits = budget, None
        return other

    def shrink(self, ran: MicroBatches) -> "Tokens | None":
        """The same split with half of what the largest micro-batch held as its budget, but room for the longest row.

        The new split shares what this one has learned. None where the longest row fills a micro-batch by itself.
        """
        if ran.cut is None or ran.cut.largest <= max(ran.cut.lengths):
            return None
        shrunk = copy.copy(self)
        shrunk._fits = max(ran.cut.largest // 2, max(ran.cut.lengths))
        return shrunk

    def measure(self, batch: Batch) -> RowLengths:
        """How long each row is."""
        if self.collate is not None:
            lengths = self._sample_lengths(batch)
            return RowLengths(lengths=lengths, width=max(lengths))
        if self.length is not None:
            return given_lengths(batch, self.length, ignored=self.ignored, keep=self.keep)
        if not isinstance(batch, Mapping) or "attention_mask" not in batch:
            keys = f" with keys {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else ""
            raise SplitError(
                f"Tokens({self.budget}) cannot see how long the rows of this {type(batch).__name__}{keys} are. Put "
                "attention_mask into the batch, give Tokens(length=...), a function of the batch that returns one length per "
                "row, or Tokens(collate=...) with a loader of raw samples (collate_fn=list)."
            )
        rows = masked_lengths(batch, ignored=self.ignored, keep=self.keep)
        if rows.untrimmed is not None and not self._has_warned:
            self._has_warned = True
            warnings.warn(f"Tokens({self.budget}): {rows.untrimmed}", stacklevel=4)
        return rows

    def cut_to(self, budget: int, batch: Batch, rows: RowLengths) -> MicroBatches:
        """The micro-batches of a batch that was measured, under another budget."""
        cut = best_cut(rows.lengths, budget, self.cost, slack=self.slack)
        if self.collate is not None:
            return MicroBatches([self.collate([batch[row] for row in chosen]) for chosen in cut.rows], cut)
        return MicroBatches(_take_and_trim(batch, cut, rows, self.keep), cut)

    def learn(self, ran: MicroBatches, seconds: Sequence[float | None]) -> None:
        """Fit the cost to the times of micro-batches that this split cut."""
        if not self._learns or ran.cut is None:
            return
        shapes = zip(ran.cut.rows, ran.cut.lengths, seconds, strict=True)
        self._learned.observe((len(rows), length, took) for rows, length, took in shapes if took is not None)

    def _sample_lengths(self, batch: Batch) -> list[int]:
        if not isinstance(batch, (list, tuple)) or not batch:
            raise SplitError(
                f"Tokens(collate=...) cuts a list of raw samples, got a {type(batch).__name__}. Give the loader "
                "collate_fn=list, or leave collate=None for batches that are collated already."
            )
        return [int((self.length or sample_length)(sample)) for sample in batch]


def _take_and_trim(batch: Batch, cut: Cut, rows: RowLengths, keep: Collection[str]) -> list[Batch]:
    count = num_rows(batch)
    parts = []
    for chosen, length in zip(cut.rows, cut.lengths, strict=True):
        is_run = chosen[-1] - chosen[0] + 1 == len(chosen)
        if length < rows.width:
            # copied even where rows are neighbours: models take .view() of what they are given
            trimmed = narrow(batch, rows.columns(length), width=rows.width, count=count, keep=keep)
            parts.append(take(trimmed, torch.tensor(chosen), count))
        elif len(chosen) == count:
            parts.append(batch)
        else:
            numbers = slice(chosen[0], chosen[-1] + 1) if is_run else torch.tensor(chosen)
            parts.append(take(batch, numbers, count))
    return parts

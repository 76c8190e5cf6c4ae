"""`Tokens(budget)`: the cheapest cut of a ragged batch."""

import copy
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import torch

from anybatch.core import (
    Batch,
    Cut,
    Groups,
    Learn,
    MicroBatches,
    Split,
    collated,
    groups_of,
    near_equal,
    rows_to_cut,
    samples_of,
    take,
)
from anybatch.errors import SplitError
from anybatch.ragged.cheapest_cut import best_cut
from anybatch.ragged.cost import Cost, LearnedCost
from anybatch.ragged.lengths import (
    TOKEN_NAMES,
    PaddedDims,
    RowLengths,
    columns_of,
    given_lengths,
    masked_lengths,
    name_of,
    narrow,
    padded_dims,
    paths_per_token,
    sample_length,
)


class TokenFields:
    """Finds the fields to trim: only what has an entry per token; being as wide as the padding is no proof of it.

    `named` are fields that the user says are per token, `kept` those that are not. A field that had a width of its own in an
    earlier batch is not per token either: as wide as the padding by chance, it is kept.
    """

    def __init__(self, named: Collection[str] = (), kept: Collection[str] = ()) -> None:
        self.named = frozenset(named)
        self.kept = frozenset(kept)
        self._own_width: set[str] = set()

    def find(self, batch: Batch, rows: RowLengths, known: Collection[str]) -> PaddedDims:
        """Find what is trimmed: fields named, those at the paths `known`, and tokenizers' own."""
        width, count = rows.width, len(rows.lengths)
        wide = padded_dims(batch, width=width, count=count, keep=self.kept)
        self._own_width |= {path for path, _ in columns_of(batch, count, self.kept) if path not in wide}
        missing = self.named - {name_of(path) for path in wide}
        if missing:
            raise SplitError(
                f"Tokens(per_token=...) names {min(missing)!r}, and the batch has no such field whose dim 1 is {width} wide, "
                "as its padding is. Give a field per token its rows in dim 0 and its tokens in dim 1, or leave the name out."
            )
        found = {}
        for path, dims in wide.items():
            name = name_of(path)
            if name in self.named or path in known or name in TOKEN_NAMES or "attention" in name:
                found[path] = dims
            elif path not in self._own_width and min(rows.lengths) < width:
                raise SplitError(
                    f"batch{path} is {width} wide, as the padding of this batch is, and nothing says whether it has an entry "
                    "per token: trimming it with the padding may cut off what counts. Name it in "
                    f"Tokens(per_token=[{name!r}]) if it has, or in Tokens(keep=[{name!r}]) if it has not."
                )
        return found


class Tokens(Split):
    """At most `budget` tokens per micro-batch, padding included, cut so that the whole batch costs least.

    Rows of like length go together, whatever their order in the batch, and each micro-batch is padded to its own longest
    row. Two ways in:

    - a padded batch: a mapping with `attention_mask`, or any batch with `length=`, a function of the batch that returns
      one length per row. Padding is cut off what has an entry per token: tokenizers' own fields, targets, and those named in
      `per_token`. Anything else as wide as the padding is an error, unless it is named in `keep` or had another width before.
      Targets equal to `ignored` do not count in the loss; padding that counts is never cut off.
    - raw samples: a list of them (a loader with `collate_fn=list`) and `collate=`, called on the samples of each
      micro-batch; `length=` is then a function of a sample, by default the length of its `input_ids` or first sequence.

    The gradient is the whole padded batch's as long as the model does not look at padding. The cut is a function of the batch,
    because `cost` is the one given, or that of a small transformer. With `learn=True` it is fitted to the times of the
    micro-batches that ran, for as long as training goes on; with `learn=50`, during 50 batches, and then it stays. What was
    learnt is in `state_dict()`, and in checkpoints. `groups` are rows that belong together, as in `Rows`. Up to a share `slack`
    of the cost is given up where that halves the largest micro-batch, once or more; with 0 the cut is the cheapest there is.
    With `round_to=32` micro-batches are padded to a multiple of 32, as far as the batch is, for kernels and compilers that want
    few lengths; `collate`, if given, has to pad so by itself.

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
        per_token: Collection[str] = (),
        groups: Groups | None = None,
        learn: bool | int = False,
        slack: float = 0.02,
        round_to: int = 1,
    ) -> None:
        if isinstance(budget, bool) or not isinstance(budget, int) or budget < 1:
            raise SplitError(
                f"Tokens({budget!r}): the budget must be a whole number of tokens, 1 or more: what one micro-batch may hold, "
                "padding included."
            )
        if isinstance(round_to, bool) or not isinstance(round_to, int) or round_to < 1:
            raise SplitError(f"Tokens(round_to={round_to!r}): expected a whole number of tokens, such as 8, 32 or 64.")
        if not 0 <= slack < 1:
            raise SplitError(f"Tokens(slack={slack!r}): expected a share of the cost, from 0 to below 1, such as 0.01.")
        if not isinstance(learn, int) or learn < 0 or (learn and cost is not None):
            raise SplitError(
                f"Tokens(learn={learn!r}{'' if cost is None else ', cost=...'}): expected True, False, or a number of batches "
                "to learn the cost from; a cost that is given is not learnt."
            )
        self.budget = budget
        self.slack = slack
        self.round_to = round_to
        self.groups = groups
        self.length = length
        self.collate = collate
        self.ignored = ignored
        self.keep = frozenset(keep)
        self._fields = TokenFields(per_token, keep)
        self._fits: int | None = None
        self._is_given = cost is not None
        self._learned = LearnedCost(cost or Cost(), batches=None if learn is True else int(learn))
        self._has_warned = False

    def __repr__(self) -> str:
        return f"Tokens({self.budget})" if self._fits is None else f"Tokens({self.budget}) shrunk to {self._fits}"

    @property
    def cost(self) -> Cost:
        """Return the cost that the next batch is cut by: constants in seconds that were fitted, or the ones given."""
        return self._learned.cost

    @property
    def learn(self) -> Learn | None:
        """Fit the cost to the times of micro-batches that this split cut; None where it stays, and nobody need time them."""
        return self._learn if self._learned.is_learning else None

    def learning(self) -> "Tokens":
        """Return a split that learns its cost as long as training goes on, unless it was given one; itself if it learns."""
        if self._is_given or self._learned.is_learning:
            return self
        other = copy.copy(self)
        other._learned = LearnedCost(self.cost)
        return other

    def state_dict(self) -> dict[str, Any]:
        """Return what was learnt of costs and of what fits, as plain values."""
        return {"fits": self._fits, "learned": self._learned.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Cut as the split that `state` was taken from; a cost that is given stays as given."""
        if not self._is_given:
            self._learned.load_state_dict(state["learned"])
        self._fits = state["fits"]

    def cut(self, batch: Batch) -> MicroBatches:
        """Cut `batch` into micro-batches, longest rows first."""
        rows = self.measure(batch)
        if self._fits is None:
            return self.cut_to(self.budget, batch, rows)
        together = 1 if self.groups is None else len(groups_of(self.groups, batch, len(rows.lengths))[0])
        return self.cut_to(max(self._fits, min(together * max(rows.lengths), self.budget)), batch, rows)

    def with_budget(self, budget: int) -> "Tokens":
        """Return the same split under another budget; what is learned is shared."""
        other = copy.copy(self)
        other.budget, other._fits = budget, None
        return other

    def resized(self, size: int) -> "Tokens":
        """Return the same split with micro-batches of at most `size` tokens; what is learned is shared."""
        other = copy.copy(self)
        other._fits = size
        return other

    def shrink(self, ran: MicroBatches) -> "Tokens | None":
        """The same split with half of what the largest micro-batch held as its budget, but room for the longest row.

        The new split shares what this one has learned. None where the longest row fills a micro-batch by itself.
        """
        if ran.cut is None or ran.cut.largest <= ran.together * max(ran.cut.lengths):
            return None
        return self.resized(max(ran.cut.largest // 2, ran.together * max(ran.cut.lengths)))

    def measure(self, batch: Batch) -> RowLengths:
        """Measure each row, rounded up to `round_to`."""
        rows = self._measured(batch)
        if self.round_to == 1:
            return rows
        rounded = [-(-length // self.round_to) * self.round_to for length in rows.lengths]
        return replace(rows, lengths=[length if self.collate else min(length, rows.width) for length in rounded])

    def _measured(self, batch: Batch) -> RowLengths:
        if self.collate is not None:
            lengths = [int((self.length or sample_length)(sample)) for sample in samples_of(batch, "Tokens")]
            return RowLengths(lengths=lengths, width=max(lengths))
        rows_to_cut(batch)
        rows = self._padded_lengths(batch)
        known = paths_per_token(batch, width=rows.width, keep=self.keep, is_masked=self.length is None)
        return replace(rows, dims=self._fields.find(batch, rows, known))

    def cut_to(self, budget: int, batch: Batch, rows: RowLengths) -> MicroBatches:
        """Cut a batch that was measured under another budget."""
        if self.groups is not None:
            return self._micro_batches(batch, *self._cut_groups(self.groups, budget, batch, rows))
        return self._micro_batches(batch, best_cut(rows.lengths, budget, self.cost, slack=self.slack), rows, 1)

    def cut_in_arrival_order(self, batch: Batch, like: MicroBatches) -> MicroBatches:
        """Equal numbers of rows, or groups, as they came, as many as the largest micro-batch of `like` has room for.

        The number depends on the longest row alone: stopping where the next row would not fit would sort rows after all.
        """
        rows = self.measure(batch)
        groups = groups_of(self.groups or 1, batch, len(rows.lengths))
        largest = 0 if like.cut is None else like.cut.largest
        room = max(largest // max(rows.lengths) // like.together, 1)
        stops = [0, *accumulate(near_equal(len(groups), room))]
        parts = [sorted(row for group in groups[start:stop] for row in group) for start, stop in pairwise(stops)]
        longest = [max(rows.lengths[row] for row in part) for part in parts]
        cut = Cut(rows=tuple(map(tuple, parts)), lengths=tuple(longest))
        return self._micro_batches(batch, cut, rows, like.together)

    def _micro_batches(self, batch: Batch, cut: Cut, rows: RowLengths, together: int) -> MicroBatches:
        if self.collate is not None:
            parts = [collated(self.collate, [batch[row] for row in chosen]) for chosen in cut.rows]
        else:
            parts = _take_and_trim(batch, cut, rows)
        return MicroBatches(parts, cut, together=together)

    def _cut_groups(self, by: Groups, budget: int, batch: Batch, rows: RowLengths) -> tuple[Cut, RowLengths, int]:
        """Cut whole groups: each is a row as long as its longest, that costs as much as all of its rows."""
        groups = groups_of(by, batch, len(rows.lengths))
        size = len(groups[0])
        if any(len(group) != size for group in groups):
            sizes = sorted({len(group) for group in groups})
            raise SplitError(
                f"Tokens(groups=...): groups of {sizes[0]} to {sizes[-1]} rows; expected all of one size. Use Rows(n, "
                "groups=...), which takes groups of any size."
            )
        longest = [max(rows.lengths[row] for row in group) for group in groups]
        if max(longest) * size > budget:
            raise SplitError(
                f"Tokens({budget}, groups=...): {size} rows of up to {max(longest)} tokens belong together, and a group is "
                f"never torn. Use Tokens({max(longest) * size}, groups=...) or more."
            )
        fixed, per_token, per_square = self.cost.constants
        cost = Cost(fixed=fixed, per_token=size * per_token, per_square=size * per_square)
        cut = best_cut(longest, budget // size, cost, slack=self.slack)
        chosen = tuple(tuple(sorted(row for number in part for row in groups[number])) for part in cut.rows)
        return Cut(rows=chosen, lengths=cut.lengths), rows, size

    def _padded_lengths(self, batch: Batch) -> RowLengths:
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
            warnings.warn(f"Tokens({self.budget}): {rows.untrimmed}", stacklevel=5)
        return rows

    def _learn(self, ran: MicroBatches, seconds: Sequence[float | None]) -> None:
        if ran.cut is not None:
            shapes = zip(ran.cut.rows, ran.cut.lengths, seconds, strict=True)
            self._learned.observe((len(rows), length, took) for rows, length, took in shapes if took is not None)


def _take_and_trim(batch: Batch, cut: Cut, rows: RowLengths) -> list[Batch]:
    count = len(rows.lengths)
    parts = []
    for chosen, length in zip(cut.rows, cut.lengths, strict=True):
        is_run = chosen[-1] - chosen[0] + 1 == len(chosen)
        if length < rows.width:
            # copied even where rows are neighbours: models take .view() of what they are given
            parts.append(take(narrow(batch, rows.columns(length), rows.dims), torch.tensor(chosen), count))
        elif len(chosen) == count:
            parts.append(batch)
        else:
            parts.append(take(batch, slice(chosen[0], chosen[-1] + 1) if is_run else torch.tensor(chosen), count))
    return parts

"""`Tokens(budget)`: the cheapest cut of a batch of rows of different lengths."""

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
from anybatch.errors import SplitError, user_stacklevel
from anybatch.ragged.cheapest_cut import best_cut
from anybatch.ragged.cost import Cost, LearnedCost
from anybatch.ragged.lengths import (
    PaddedDims,
    RowLengths,
    columns_of,
    given_lengths,
    masked_lengths,
    name_of,
    narrow,
    padded_dims,
    sample_length,
    targets_of,
)

_TOKEN_NAMES = {"ids", "input_ids", "inputs_embeds", "token_ids", "tokens"}
_TOKEN_NAMES |= {"token_type_ids", "position_ids", "special_tokens_mask"}
"""Tokenizers' names of fields with one entry per token."""


class Tokens(Split):
    """At most `budget` tokens per micro-batch, padding included, split so that the whole batch costs least.

    Rows of like length go together, whatever their order in the batch, and each micro-batch is padded to its own longest row.
    The gradient is that of the whole padded batch if the model ignores padding. There are two kinds of batches:

    - Padded batches: a mapping with `attention_mask`, or any batch with `length=`. Padding is cut off fields that have an entry
      per token: tokenizers' own fields, targets, and those named in `per_token`. Any other field as wide as the padding is an
      error, unless `keep` names it or it had another width before. Padding that counts in the loss is never cut off.
    - Raw samples: a list of them (a loader with `collate_fn=list`) with `collate=`.

    Args:
        budget: Most tokens of a micro-batch.
        length: Function of the batch that returns one length per row; with `collate`, of one sample that returns its length,
            by default that of its `input_ids` or first sequence.
        collate: Called on the samples of each micro-batch.
        cost: Cost to minimise; by default that of a small transformer.
        ignored: Targets equal to this do not count in the loss.
        keep: Names of fields that have no entry per token.
        per_token: Names of fields that have one.
        groups: Rows that stay together, as in `Rows`.
        learn: Fit the cost to the times of micro-batches that ran: True for all of training, 50 for 50 batches. With False the
            split is a function of the batch alone. `state_dict()` and checkpoints hold the fit.
        slack: Accept a cost higher by this share if it halves the largest micro-batch, once or more.
        round_to: Pad micro-batches to a multiple of this, up to the width of the batch, for kernels and compilers that want
            few lengths. A `collate` function has to pad by itself.

    Raises:
        SplitError: If an argument is out of range; in an update, if lengths cannot be read or a row exceeds the budget.

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
        self.per_token = frozenset(per_token)
        self._own_width: set[str] = set()
        """Fields that had another width than the padding in some batch, and so have no entry per token."""
        self._fits: int | None = None
        self._is_given = cost is not None
        self._learned = LearnedCost(cost or Cost(), batches=None if learn is True else int(learn))
        self._has_warned = False

    def __repr__(self) -> str:
        return f"Tokens({self.budget})" if self._fits is None else f"Tokens({self.budget}) shrunk to {self._fits}"

    @property
    def cost(self) -> Cost:
        """The cost that the next batch is split by: the fitted one, in seconds, or the one given."""
        return self._learned.cost

    @property
    def learn(self) -> Learn | None:
        return self._learn if self._learned.is_learning else None

    def _learn(self, ran: MicroBatches, seconds: Sequence[float | None]) -> None:
        if ran.cut is not None:
            shapes = zip(ran.cut.rows, ran.cut.lengths, seconds, strict=True)
            self._learned.observe((len(rows), length, took) for rows, length, took in shapes if took is not None)

    def state_dict(self) -> dict[str, Any]:
        """Return the fitted cost and the size that fits in memory, as plain values."""
        return {"fits": self._fits, "learned": self._learned.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict()`, except that a cost given to this split stays.

        Args:
            state: What `state_dict()` returned.

        Raises:
            SplitError: If it is something else.
        """
        if not self._is_given:
            self._learned.load_state_dict(state["learned"])
        self._fits = state["fits"]

    def learning(self) -> "Tokens":
        """Return a split that learns its cost all through training; itself if it learns or was given a cost."""
        is_fixed = self._is_given or self._learned.is_learning
        return self if is_fixed else self._with(_learned=LearnedCost(self.cost))

    def with_budget(self, budget: int) -> "Tokens":
        """Return the same split with another `budget`; the two share what they learn."""
        return self._with(budget=budget, _fits=None)

    def resized(self, size: int) -> "Tokens":
        return self._with(_fits=size)

    def _with(self, **changed: Any) -> "Tokens":
        other = copy.copy(self)
        vars(other).update(changed)
        return other

    def shrink(self, ran: MicroBatches) -> "Tokens | None":
        if ran.cut is None or ran.cut.largest <= ran.together * max(ran.cut.lengths):
            return None
        return self.resized(max(ran.cut.largest // 2, ran.together * max(ran.cut.lengths)))

    def cut(self, batch: Batch) -> MicroBatches:
        rows = self.measure(batch)
        if self._fits is None:
            return self.cut_to(self.budget, batch, rows)
        together = 1 if self.groups is None else len(groups_of(self.groups, batch, len(rows.lengths))[0])
        return self.cut_to(max(self._fits, min(together * max(rows.lengths), self.budget)), batch, rows)

    def cut_to(self, budget: int, batch: Batch, rows: RowLengths) -> MicroBatches:
        """Split `batch`, which was measured as `rows`, under another `budget`."""
        if self.groups is not None:
            return self._cut_groups(self.groups, budget, batch, rows)
        return self._micro_batches(batch, rows, best_cut(rows.lengths, budget, self.cost, slack=self.slack), 1)

    def _cut_groups(self, by: Groups, budget: int, batch: Batch, rows: RowLengths) -> MicroBatches:
        """Split like `best_cut`, where a group stands for one row as long as its longest that costs as much as all."""
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
        return self._micro_batches(batch, rows, Cut(rows=chosen, lengths=cut.lengths), size)

    def cut_in_arrival_order(self, batch: Batch, like: MicroBatches) -> MicroBatches:
        # the number of rows depends on the longest row alone: stopping where the next does not fit would sort rows after all
        rows = self.measure(batch)
        groups = groups_of(self.groups or 1, batch, len(rows.lengths))
        largest = 0 if like.cut is None else like.cut.largest
        room = max(largest // max(rows.lengths) // like.together, 1)
        stops = [0, *accumulate(near_equal(len(groups), room))]
        parts = [sorted(row for group in groups[start:stop] for row in group) for start, stop in pairwise(stops)]
        longest = [max(rows.lengths[row] for row in part) for part in parts]
        return self._micro_batches(
            batch, rows, Cut(rows=tuple(map(tuple, parts)), lengths=tuple(longest)), like.together
        )

    def _micro_batches(self, batch: Batch, rows: RowLengths, cut: Cut, together: int) -> MicroBatches:
        both = zip(cut.rows, cut.lengths, strict=True)
        return MicroBatches([self._take(batch, rows, *one) for one in both], cut, together=together)

    def _take(self, batch: Batch, rows: RowLengths, chosen: Sequence[int], length: int) -> Batch:
        count = len(rows.lengths)
        if self.collate is not None:
            return collated(self.collate, [batch[row] for row in chosen])
        if length < rows.width:
            # copied even where rows are neighbours, because models take .view() of their inputs
            return take(narrow(batch, rows.columns(length), rows.dims), torch.tensor(chosen), count)
        if len(chosen) == count:
            return batch
        is_run = chosen[-1] - chosen[0] + 1 == len(chosen)
        return take(batch, slice(chosen[0], chosen[-1] + 1) if is_run else torch.tensor(chosen), count)

    def measure(self, batch: Batch) -> RowLengths:
        """Measure each row of `batch`, rounded up to `round_to`."""
        if self.collate is not None:
            lengths = [int((self.length or sample_length)(sample)) for sample in samples_of(batch, "Tokens")]
            rows = RowLengths(lengths=lengths, width=max(lengths))
        else:
            rows_to_cut(batch)
            rows = self._padded_lengths(batch)
            rows = replace(rows, dims=self._token_dims(batch, rows))
        if self.round_to == 1:
            return rows
        rounded = [-(-length // self.round_to) * self.round_to for length in rows.lengths]
        return replace(rows, lengths=[length if self.collate else min(length, rows.width) for length in rounded])

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
            warnings.warn(f"Tokens({self.budget}): {rows.untrimmed}", stacklevel=user_stacklevel())
        return rows

    def _token_dims(self, batch: Batch, rows: RowLengths) -> PaddedDims:
        """Find the fields with an entry per token, which are trimmed. The width of the padding alone is no proof of one."""
        width, count = rows.width, len(rows.lengths)
        columns = list(columns_of(batch, count, self.keep))
        wide = padded_dims(batch, width=width, count=count, keep=self.keep)
        self._own_width |= {path for path, _ in columns if path not in wide}
        missing = self.per_token - {name_of(path) for path in wide}
        if missing:
            raise SplitError(
                f"Tokens(per_token=...) names {min(missing)!r}, and the batch has no such field whose dim 1 is {width} wide, "
                "as its padding is. Give a field per token its rows in dim 0 and its tokens in dim 1, or leave the name out."
            )
        known = {path for path, _ in targets_of(batch, width, count, self.keep)}
        if self.length is not None:  # without a mask the first field of two dims says what the width is
            known.update([path for path, value in columns if value.shape[1] == width][:1])
        found = {}
        for path, dims in wide.items():
            name = name_of(path)
            if name in self.per_token | _TOKEN_NAMES or path in known or "attention" in name:
                found[path] = dims
            elif path not in self._own_width and min(rows.lengths) < width:
                raise SplitError(
                    f"batch{path} is {width} wide, as the padding of this batch is, and nothing says whether it has an entry "
                    "per token: trimming it with the padding may cut off what counts. Name it in "
                    f"Tokens(per_token=[{name!r}]) if it has, or in Tokens(keep=[{name!r}]) if it has not."
                )
        return found

"""`Rows(n)`: micro-batches of at most n rows."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from numbers import Integral
from typing import Any

import torch

from anybatch.core.batch import read, rows_first, rows_in_dim, rows_to_cut, split_rows, take
from anybatch.core.belonging import Groups, groups_of
from anybatch.core.collating import collated, samples_of
from anybatch.core.micro_batches import Cut, MicroBatches, Split
from anybatch.core.nesting import Batch
from anybatch.errors import SplitError


@dataclass(frozen=True, slots=True)
class Rows(Split):
    """At most `size` rows per micro-batch: ceil(rows / size) of them, near-equal, longer ones first.

    Tensors are cut into views: nothing is copied. With `collate`, a batch is a list of raw samples (a loader with
    `collate_fn=list`), and those of each micro-batch are collated. `batch_dim` is the dim of tensors that is the rows, 1 for
    time-first batches; a tensor with fewer dims has them in dim 0. `groups` says which rows belong together and are never
    torn apart: a number of neighbours, `Stacked(2)` for [chosen; rejected], or a function of the batch that returns one
    number per row, the same for rows of one group. Rows keep their order inside a micro-batch. With `tail=2`, all
    micro-batches but the last are full, and the last has 2 rows or more: fewer shapes for kernels and compilers.

    >>> [len(part) for part in Rows(16).cut(torch.zeros(40, 2))]
    [14, 13, 13]
    >>> [len(part) for part in Rows(16, tail=2).cut(torch.zeros(40, 2))]
    [16, 16, 8]
    >>> from anybatch import Stacked
    >>> [part.tolist() for part in Rows(4, groups=Stacked(2)).cut(torch.arange(8))]
    [[0, 1, 4, 5], [2, 3, 6, 7]]
    """

    size: int
    collate: Callable[[list[Any]], Batch] | None = None
    batch_dim: int | None = None
    groups: Groups | None = None
    tail: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.size, bool) or not isinstance(self.size, Integral) or self.size < 1:
            raise SplitError(
                f"Rows({self.size!r}): the micro-batch size must be a whole number of rows, 1 or more. Use Rows(1) for "
                "the least memory."
            )
        dim = self.batch_dim
        if dim is not None and (isinstance(dim, bool) or not isinstance(dim, int) or dim < 0):
            raise SplitError(
                f"Rows(batch_dim={dim!r}): expected the dim that is the rows, 0 or more; 1 for time first."
            )
        if self.tail is not None and (isinstance(self.tail, bool) or not isinstance(self.tail, int) or self.tail < 1):
            raise SplitError(
                f"Rows(tail={self.tail!r}): expected the fewest rows of the last micro-batch, 1 or more, such as 2; None for "
                "near-equal micro-batches."
            )
        if self.batch_dim and self.collate is not None:
            raise SplitError(
                f"Rows(collate=..., batch_dim={dim}): samples are counted before they are collated. Leave batch_dim out: "
                "what collate returns may have its rows in any dim."
            )

    def __repr__(self) -> str:
        said = {one.name: getattr(self, one.name) for one in fields(self)}
        return f"Rows({', '.join(f'{name}={value!r}' for name, value in said.items() if value is not None)})"

    @property
    def is_plain(self) -> bool:
        """True where rows are dim 0 and none belong together: any of them may be taken alone."""
        return self.collate is None and not self.batch_dim and self.groups is None

    @property
    def reads_dim_0(self) -> bool:
        """True where nobody said that dim 0 is the rows: it is taken for them."""
        return self.collate is None and self.batch_dim is None

    def count(self, batch: Batch) -> int:
        """The rows of a whole batch."""
        if self.collate is not None:
            return len(samples_of(batch, "Rows"))
        return rows_to_cut(rows_first(batch, self.batch_dim) if self.batch_dim else batch)

    def least(self, batch: Batch) -> int:
        """The fewest rows that a micro-batch of `batch` can hold: those of its largest group."""
        return 1 if self.groups is None else max(map(len, groups_of(self.groups, batch, self.count(batch))))

    def cut(self, batch: Batch) -> MicroBatches:
        """The micro-batches of `batch`; 40 rows by 16 are 14, 13, 13."""
        count = self.count(batch)
        if self.is_plain:
            if count <= self.size:
                return MicroBatches((read(batch),))
            return MicroBatches(split_rows(batch, self._sizes(count, self.size)))
        groups = groups_of(self.groups or 1, batch, count)
        largest = max(map(len, groups))
        rows = self._rows_of(groups, largest)
        cut = Cut(rows=rows, lengths=(1,) * len(rows))
        return MicroBatches(self._parts(batch, rows, count), cut, together=largest)

    def resized(self, size: int) -> "Rows":
        """The same split with micro-batches of at most `size` rows."""
        return replace(self, size=size)

    def shrink(self, ran: MicroBatches) -> "Rows | None":
        """A split of half the rows: half of `size`, or half of the whole batch where that has fewer; no group is torn."""
        largest = min(self.size, sum(len(rows) for rows in ran.row_numbers))
        return replace(self, size=largest // 2) if largest // 2 >= ran.together else None

    def _sizes(self, count: int, size: int) -> list[int]:
        return near_equal(count, size) if self.tail is None else full_and_tail(count, size, self.tail)

    def _rows_of(self, groups: list[tuple[int, ...]], largest: int) -> tuple[tuple[int, ...], ...]:
        """The rows of each micro-batch, ascending."""
        if largest > self.size:
            raise SplitError(
                f"Rows({self.size}, groups=...): {largest} rows belong together, and a group is never torn. Use "
                f"Rows({largest}, groups=...) or more."
            )
        stops = [0, *accumulate(self._sizes(len(groups), self.size // largest))]
        return tuple(
            tuple(sorted(row for group in groups[start:stop] for row in group)) for start, stop in pairwise(stops)
        )

    def _parts(self, batch: Batch, rows: tuple[tuple[int, ...], ...], count: int) -> list[Batch]:
        if self.collate is not None:
            samples = samples_of(batch, "Rows")
            return [collated(self.collate, [samples[row] for row in chosen]) for chosen in rows]
        first = read(rows_first(batch, self.batch_dim) if self.batch_dim else batch)
        parts = [take(first, torch.tensor(chosen), count) for chosen in rows]
        return [rows_in_dim(part, self.batch_dim) for part in parts] if self.batch_dim else parts


def near_equal(count: int, size: int) -> list[int]:
    """The sizes of ceil(count / size) parts that differ by at most 1, longer ones first."""
    num_parts = -(-count // size)
    shortest, num_longer = divmod(count, num_parts)
    return [shortest + 1] * num_longer + [shortest] * (num_parts - num_longer)


def full_and_tail(count: int, size: int, least: int) -> list[int]:
    """The sizes of ceil(count / size) parts, all full but the last; where that has too few, the one before it gives some.

    >>> full_and_tail(40, 16, 2), full_and_tail(33, 16, 2), full_and_tail(33, 32, 16)
    ([16, 16, 8], [16, 15, 2], [17, 16])
    """
    num_full, rest = divmod(count, size)
    parts = [size] * num_full + ([rest] if rest else [])
    given = min(least - rest, (size - rest) // 2) if rest and num_full else 0
    if given > 0:
        parts[-2:] = [size - given, rest + given]
    return parts

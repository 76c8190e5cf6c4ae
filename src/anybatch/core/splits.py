"""Splits cut a batch into micro-batches: `Split`, the base class, and `Rows`; `windows` groups a loader's micro-batches.

`MicroBatches` is a batch that was cut; `Dealt` is one rank's part of a batch. After an out-of-memory error, `smaller` returns
the split to use next.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, fields, replace
from itertools import accumulate, chain, islice, pairwise
from numbers import Integral
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from anybatch.core.batch import (
    Batch,
    as_samples,
    map_tensors,
    num_rows,
    read,
    rows_first,
    rows_in_dim,
    rows_to_cut,
    split_rows,
    take,
)
from anybatch.display import called, name_of, one_line
from anybatch.errors import BatchError, SplitError


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Row numbers of each micro-batch, in the order they run. `Tokens` puts the longest first, so that it fails early."""

    rows: tuple[tuple[int, ...], ...]
    """Row numbers of each micro-batch, ascending; every row of the batch is in exactly one."""
    lengths: tuple[int, ...]
    """Padded length of each micro-batch; 1 if rows are counted, 0 if it is not used."""

    @property
    def padded_tokens(self) -> int:
        """Tokens of all micro-batches, padding included."""
        return sum(len(rows) * length for rows, length in zip(self.rows, self.lengths, strict=True))

    @property
    def largest(self) -> int:
        """Tokens of the largest micro-batch, padding included."""
        return max(len(rows) * length for rows, length in zip(self.rows, self.lengths, strict=True))

    def cost(self, cost: Any) -> Any:
        """Sum of the costs of all micro-batches."""
        return sum(cost.of(len(rows), length) for rows, length in zip(self.rows, self.lengths, strict=True))


@dataclass(frozen=True, slots=True, init=False)
class MicroBatches:
    """A batch that is cut already; `Update` and `Accumulator` take it in place of a batch.

    Args:
        micro_batches: The micro-batches, in the order they run.
        cut: Row numbers of each micro-batch; None if rows are in their own order.
        whole: Never cut a micro-batch further; if memory runs out, raise instead.
        together: Size of the largest group of rows that belong together: no micro-batch is cut below that.

    Raises:
        BatchError: If there is no micro-batch, or `cut` has another number of them.

    Example:
        >>> batch = MicroBatches([torch.zeros(3, 2), torch.zeros(5, 2)])
        >>> len(batch), [len(rows) for rows in batch.row_numbers]
        (2, [3, 5])
    """

    micro_batches: tuple[Batch, ...]
    cut: Cut | None
    whole: bool
    together: int

    def __init__(
        self, micro_batches: Iterable[Batch], cut: Cut | None = None, *, whole: bool = False, together: int = 1
    ) -> None:
        values = {"micro_batches": tuple(micro_batches), "cut": cut, "whole": whole, "together": together}
        for name, value in values.items():
            object.__setattr__(self, name, value)
        if not self.micro_batches:
            raise BatchError("MicroBatches() holds 0 micro-batches; give at least 1.")
        if cut is not None and len(cut.rows) != len(self.micro_batches):
            raise BatchError(
                f"MicroBatches() holds {len(self.micro_batches)} micro-batches, but its cut has {len(cut.rows)}; give one "
                "tuple of row numbers per micro-batch."
            )

    __repr__ = one_line

    @property
    def row_numbers(self) -> tuple[tuple[int, ...], ...]:
        """Row numbers of each micro-batch: those of `cut`, or else consecutive."""
        if self.cut is not None:
            return self.cut.rows
        stops = [0, *accumulate(num_rows(micro_batch) for micro_batch in self.micro_batches)]
        return tuple(tuple(range(start, stop)) for start, stop in pairwise(stops))

    def __len__(self) -> int:
        return len(self.micro_batches)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.micro_batches)

    def __getitem__(self, index: int) -> Batch:
        return self.micro_batches[index]


@dataclass(frozen=True, slots=True)
class Dealt:
    """One rank's part of a batch that several ranks share; `Update` and `Accumulator` take it in place of a batch.

    A rank without a row has `row_numbers == ()` and a stand-in row in `batch`, the first of the whole batch. It runs forward,
    backward and every collective with the stand-in, which has no weight.

    Args:
        batch: This rank's rows, collated; or the stand-in.
        row_numbers: Row numbers in the whole batch, in the order of `batch`.
        num_rows: Number of rows of the whole batch, over all ranks.
    """

    batch: Batch
    row_numbers: tuple[int, ...]
    num_rows: int

    __repr__ = one_line

    @property
    def is_stand_in(self) -> bool:
        """True if this rank has no row."""
        return not self.row_numbers

    def pin_memory(self) -> "Dealt":
        """Pin the memory of every tensor, as a loader with `pin_memory=True` does."""
        return replace(self, batch=map_tensors(self.batch, Tensor.pin_memory))


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Model, objective, optimizer and options of an `Update`: everything but the batch that its memory depends on."""

    model: Any
    objective: Any
    optimizer: Any = None
    """None if the caller steps the optimizer."""
    options: Any = None


Learn = Callable[[MicroBatches, Sequence[float | None]], None]
"""Called after a batch with the seconds of each micro-batch; None for one that was left out."""


@runtime_checkable
class CutsBatches(Protocol):
    """A `Split`, or a class of the user's own that has `cut`."""

    def cut(self, batch: Batch) -> MicroBatches: ...


class Split:
    """Base class of policies that cut a batch into micro-batches.

    A split of your own derives from it and defines `cut`. Everything else has a default.

    Example:
        >>> class Halves(Split):
        ...     def cut(self, batch):
        ...         return MicroBatches(batch.chunk(2))
        >>> len(Halves().cut(torch.zeros(6, 2)))
        2
    """

    __slots__ = ()

    collate: Callable[[list[Any]], Batch] | None = None
    """Collates the samples of a micro-batch, if batches are lists of raw samples."""
    groups: Any = None
    """Groups of rows that belong together; see `Rows`."""
    batch_dim: int | None = None
    """Dim of the rows, if it was given."""

    def cut(self, batch: Batch) -> MicroBatches:
        """Cut a batch.

        Args:
            batch: Any nesting of tensors that share their first dimension.

        Returns:
            Micro-batches in the order they run; every row of the batch is in exactly one.
        """
        raise NotImplementedError(f"{type(self).__name__} has no cut(batch), which returns MicroBatches.")

    def cut_in_arrival_order(self, batch: Batch, like: MicroBatches) -> MicroBatches:
        """Cut `batch` without sorting rows, no micro-batch larger than the largest of `like`; for splits that sort rows."""
        return like

    def shrink(self, ran: MicroBatches) -> "Split | None":
        """Return the split to use after `ran` did not fit, with about half the size; None if there is none."""
        return None

    @property
    def choose_for(self) -> Callable[[Workload, Batch], None] | None:
        """Function that is called before each batch is cut, in a split that chooses its size by the workload."""
        return None

    @property
    def learn(self) -> Learn | None:
        """Function that gets micro-batches `ran` and their `seconds`; None if they need not be timed."""
        return None

    @property
    def resized(self) -> "Callable[[int], Split] | None":
        """Function of a `size` that returns the same split with it; None for a split without a size."""
        return None

    @property
    def bound(self) -> int:
        """Upper bound of the size of micro-batches; 0 if it is not known."""
        return 0

    @property
    def need(self) -> str | None:
        """Predicted memory of an update with a single row, in words."""
        return None

    @property
    def reads_dim_0(self) -> bool:
        """True if dim 0 is read as the rows without having been given."""
        return False

    @property
    def sums(self) -> str:
        """Dtype that gradients are summed in under `sums="auto"`: "fp32" or "param"."""
        return "fp32"


class OwnSplit(Split):
    """Wrapper of a user's split that does not derive from `Split`: its own attributes, and defaults for the rest."""

    def __init__(self, own: CutsBatches) -> None:
        self.own = own

    def __repr__(self) -> str:
        return repr(self.own)

    def __getattribute__(self, name: str) -> Any:
        own = object.__getattribute__(self, "__dict__").get("own")
        if name.startswith("__") or name in ("own", "shrink", "resized") or not hasattr(own, name):
            return object.__getattribute__(self, name)
        return getattr(own, name)

    def shrink(self, ran: MicroBatches) -> Split | None:
        found = self.own.shrink(ran) if hasattr(self.own, "shrink") else None
        return self if found is self.own else None if found is None else derived(found)

    @property
    def resized(self) -> Callable[[int], Split] | None:
        own = getattr(self.own, "resized", None)
        return None if own is None else lambda size: self if (found := own(size)) is self.own else derived(found)


def derived(split: CutsBatches) -> Split:
    """Return the split itself if it derives from `Split`, else wrapped."""
    return split if isinstance(split, Split) else OwnSplit(split)


MicroBatch = int | Split | CutsBatches | Literal["auto"]
"""A number of rows, a split, or "auto"."""


def as_split(micro_batch: MicroBatch) -> Split:
    """Convert the argument `micro_batch`: an int is `Rows(int)`, "auto" the fastest size up to the one of `Fit()`."""
    if isinstance(micro_batch, Integral):
        return Rows(int(micro_batch))
    if isinstance(micro_batch, str) and micro_batch == "auto":
        from anybatch.core.plugins import auto_split

        return auto_split()
    if isinstance(micro_batch, CutsBatches) and not isinstance(micro_batch, type):
        return derived(micro_batch)
    raise SplitError(
        f"micro_batch={micro_batch!r} is not a split: give a number of rows, such as 16, a split, such as Rows(16), "
        'Tokens(8192) or Fit("6GiB"), or "auto".'
    )


@dataclass(frozen=True, slots=True)
class Stacked:
    """Groups of rows for a batch of stacked blocks, as in [chosen; rejected]: row k of all blocks is one group.

    Args:
        parts: Number of blocks.

    Raises:
        SplitError: If `parts` is not a whole number above 0.

    Example:
        >>> [part.tolist() for part in Rows(4, groups=Stacked(2)).cut(torch.arange(8))]
        [[0, 1, 4, 5], [2, 3, 6, 7]]
    """

    parts: int

    def __post_init__(self) -> None:
        if isinstance(self.parts, bool) or not isinstance(self.parts, int) or self.parts < 1:
            raise SplitError(
                f"Stacked({self.parts!r}): expected a whole number of blocks, such as 2 for [chosen; rejected]."
            )


Groups = int | Stacked | Callable[[Batch], Any]
"""A number of neighbouring rows, blocks, or a function of the batch that returns one number per row."""


def groups_of(groups: Groups, batch: Batch, count: int) -> list[tuple[int, ...]]:
    """List the rows of each group, ascending; groups in the order of their first rows.

    >>> groups_of(2, None, 4), groups_of(Stacked(2), None, 4), groups_of(lambda batch: [7, 1, 7], None, 3)
    ([(0, 1), (2, 3)], [(0, 2), (1, 3)], [(0, 2), (1,)])
    """
    found: dict[Any, list[int]] = {}
    for row, key in enumerate(_keys(groups, batch, count)):
        found.setdefault(key, []).append(row)
    return [tuple(rows) for rows in found.values()]


def _keys(groups: Groups, batch: Batch, count: int) -> list[Any]:
    if isinstance(groups, Stacked):
        _check_even(count, groups.parts, f"groups={groups!r}")
        return [row % (count // groups.parts) for row in range(count)]
    if isinstance(groups, bool) or not (isinstance(groups, int) or callable(groups)) or groups == 0:
        raise SplitError(
            f"groups={groups!r}: expected how many neighbouring rows belong together, such as 2, Stacked(2) for [chosen; "
            "rejected], or a function of the batch that returns one number per row."
        )
    if isinstance(groups, int):
        _check_even(count, groups, f"groups={groups}")
        return [row // groups for row in range(count)]
    numbers = groups(batch)
    keys = list(numbers.tolist() if hasattr(numbers, "tolist") else numbers)
    if len(keys) != count:
        raise SplitError(
            f"groups(batch) gave {len(keys)} numbers for {count} rows; expected one per row, the same for rows that belong "
            "together."
        )
    return keys


def _check_even(count: int, size: int, spelled: str) -> None:
    if size < 1 or count % size:
        raise SplitError(
            f"{spelled}: a batch of {count} rows is no whole number of groups. Give batches of a multiple of {size} rows "
            "(drop_last=True in the loader), or groups=, a function of the batch that returns one number per row."
        )


@dataclass(frozen=True, slots=True)
class Rows(Split):
    """Split into ceil(rows / size) micro-batches of near-equal size, longer ones first. Tensors become views.

    Args:
        size: Largest number of rows in a micro-batch.
        collate: Collates the samples of each micro-batch; a batch is then a list of raw samples (a loader with
            `collate_fn=list`).
        batch_dim: Dim of the rows: 1 for time-first batches. A tensor with fewer dims has its rows in dim 0.
        groups: Rows that stay together: a number of neighbours, `Stacked(2)` for [chosen; rejected], or a function of the
            batch that returns one number per row, equal within a group. Rows keep their order inside a micro-batch.
        tail: Fill all micro-batches but the last, which has at least this many rows: fewer shapes for compilers.

    Raises:
        SplitError: If an argument is out of range, or a group is larger than `size`.

    Example:
        >>> [len(part) for part in Rows(16).cut(torch.zeros(40, 2))]
        [14, 13, 13]
        >>> [len(part) for part in Rows(16, tail=2).cut(torch.zeros(40, 2))]
        [16, 16, 8]
        >>> [part.tolist() for part in Rows(4, groups=2).cut(torch.arange(6))]
        [[0, 1, 2, 3], [4, 5]]
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
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return f"Rows({', '.join(f'{name}={value!r}' for name, value in values.items() if value is not None)})"

    @property
    def is_plain(self) -> bool:
        """True if rows are dim 0 and have no groups, so that any of them can be taken alone."""
        return self.collate is None and not self.batch_dim and self.groups is None

    @property
    def reads_dim_0(self) -> bool:
        return self.collate is None and self.batch_dim is None

    def count(self, batch: Batch) -> int:
        """Count the rows of a whole `batch`."""
        if self.collate is not None:
            return len(samples_of(batch, "Rows"))
        return rows_to_cut(rows_first(batch, self.batch_dim) if self.batch_dim else batch)

    def least(self, batch: Batch) -> int:
        """Return the smallest possible micro-batch of `batch`: the size of its largest group."""
        return 1 if self.groups is None else max(map(len, groups_of(self.groups, batch, self.count(batch))))

    def cut(self, batch: Batch) -> MicroBatches:
        count = self.count(batch)
        if self.is_plain:
            if count <= self.size:
                return MicroBatches((read(batch),))
            return MicroBatches(split_rows(batch, self._sizes(count, self.size)))
        groups = groups_of(self.groups or 1, batch, count)
        largest = max(map(len, groups))
        if largest > self.size:
            raise SplitError(
                f"Rows({self.size}, groups=...): {largest} rows belong together, and a group is never torn. Use "
                f"Rows({largest}, groups=...) or more."
            )
        stops = [0, *accumulate(self._sizes(len(groups), self.size // largest))]
        members = (chain.from_iterable(groups[start:stop]) for start, stop in pairwise(stops))
        rows = tuple(tuple(sorted(numbers)) for numbers in members)
        cut = Cut(rows=rows, lengths=(1,) * len(rows))
        return MicroBatches(self._parts(batch, rows, count), cut, together=largest)

    def resized(self, size: int) -> "Rows":
        return replace(self, size=size)

    def shrink(self, ran: MicroBatches) -> "Rows | None":
        """Halve `size`, or the rows of the batch in `ran` if it has fewer; None if a group would not fit."""
        largest = min(self.size, sum(len(rows) for rows in ran.row_numbers))
        return replace(self, size=largest // 2) if largest // 2 >= ran.together else None

    def _sizes(self, count: int, size: int) -> list[int]:
        return near_equal(count, size) if self.tail is None else full_and_tail(count, size, self.tail)

    def _parts(self, batch: Batch, rows: tuple[tuple[int, ...], ...], count: int) -> list[Batch]:
        if self.collate is not None:
            samples = samples_of(batch, "Rows")
            return [collated(self.collate, [samples[row] for row in chosen]) for chosen in rows]
        first = read(rows_first(batch, self.batch_dim) if self.batch_dim else batch)
        parts = [take(first, torch.tensor(chosen), count) for chosen in rows]
        return [rows_in_dim(part, self.batch_dim) for part in parts] if self.batch_dim else parts


def near_equal(count: int, size: int) -> list[int]:
    """Return the sizes of ceil(count / size) parts that differ by at most 1, longer ones first."""
    num_parts = -(-count // size)
    shortest, num_longer = divmod(count, num_parts)
    return [shortest + 1] * num_longer + [shortest] * (num_parts - num_longer)


def full_and_tail(count: int, size: int, least: int) -> list[int]:
    """Return the sizes of ceil(count / size) parts, all full but the last, which takes from the one before up to `least`.

    >>> full_and_tail(40, 16, 2), full_and_tail(33, 16, 2), full_and_tail(33, 32, 16)
    ([16, 16, 8], [16, 15, 2], [17, 16])
    """
    num_full, rest = divmod(count, size)
    parts = [size] * num_full + ([rest] if rest else [])
    given = min(least - rest, (size - rest) // 2) if rest and num_full else 0
    if given > 0:
        parts[-2:] = [size - given, rest + given]
    return parts


def samples_of(batch: Batch, split: str) -> list[Any] | tuple[Any, ...]:
    """Return a batch of raw samples, or raise if it was collated already."""
    if not isinstance(batch, (list, tuple)) or not batch:
        raise SplitError(
            f"{split}(collate=...) cuts a list of raw samples, got a {type(batch).__name__}. Give the loader "
            "collate_fn=list, or leave collate=None for batches that are collated already."
        )
    return batch


def collated(collate: Callable[[list[Any]], Batch], samples: list[Any]) -> Batch:
    """Collate samples; a returned list of as many objects is marked as one sample per row."""
    made = collate(samples)
    return as_samples(made) if type(made) is list and len(made) == len(samples) else made


@dataclass(frozen=True, slots=True)
class AsGiven(Split):
    """Split of batches that are `MicroBatches` already."""

    def cut(self, batch: Batch) -> MicroBatches:
        assert isinstance(batch, MicroBatches)
        return batch


@dataclass(frozen=True, slots=True)
class CutFurther(Split):
    """Micro-batches of another split, those of more than `size` rows cut into near-equal parts.

    >>> import torch
    >>> [len(part) for part in CutFurther(AsGiven(), 4).cut(MicroBatches((torch.zeros(7), torch.zeros(3))))]
    [4, 3, 3]
    """

    split: Split
    size: int

    def cut(self, batch: Batch) -> MicroBatches:
        whole = self.split.cut(batch)
        if whole.whole or whole.together > 1:
            return whole
        parts = [part for micro_batch in whole for part in self._parts(micro_batch)]
        if whole.cut is None:
            return MicroBatches(parts)
        rows: list[tuple[int, ...]] = []
        lengths: list[int] = []
        for numbers, length in zip(whole.cut.rows, whole.cut.lengths, strict=True):
            stops = [0, *accumulate(near_equal(len(numbers), self.size))]
            rows += [numbers[start:stop] for start, stop in pairwise(stops)]
            lengths += [length] * (len(stops) - 1)
        return MicroBatches(parts, Cut(rows=tuple(rows), lengths=tuple(lengths)))

    def resized(self, size: int) -> "CutFurther":
        return CutFurther(self.split, size)

    def _parts(self, micro_batch: Batch) -> list[Batch]:
        # a split has checked its batch already; micro-batches from the user have not been checked
        count = rows_to_cut(micro_batch) if isinstance(self.split, AsGiven) else num_rows(micro_batch)
        return split_rows(micro_batch, near_equal(count, self.size)) if count > self.size else [micro_batch]


def size_that_ran(split: Split, ran: MicroBatches) -> int | None:
    """Return the size of the largest of these micro-batches, in tokens if `split` counts them, else in rows."""
    if ran.cut is not None and not isinstance(split, CutFurther):
        return ran.cut.largest
    return _most_rows(ran)


def _most_rows(ran: MicroBatches) -> int | None:
    try:
        return max(len(rows) for rows in ran.row_numbers)
    except BatchError:
        return None  # micro-batches from the user, whose rows cannot be counted


def smaller(split: CutsBatches, ran: MicroBatches) -> Split | None:
    """Return the split to use after `ran`, which `split` cut, did not fit; None if no micro-batch can be smaller.

    A split decides by `shrink`; if it does not, its micro-batches are cut in half, unless they have groups.
    """
    if ran.whole:
        return None
    split = derived(split)
    shrunk = split.shrink(ran)
    if shrunk is not None or ran.together > 1:
        return shrunk
    most = _most_rows(ran) or 1
    return None if most == 1 else CutFurther(split.split if isinstance(split, CutFurther) else split, most // 2)


def is_in_arrival_order(cut: MicroBatches) -> bool:
    """Return True if the rows, or the first rows of groups, were not sorted."""
    if cut.cut is None:
        return True
    order = [number for numbers in cut.cut.rows for number in (numbers if cut.together == 1 else numbers[:1])]
    return order == sorted(order)


def in_arrival_order(split: CutsBatches, batch: Batch, cut: MicroBatches) -> MicroBatches:
    """Return `cut`, which `split` made, or a new one without sorting if the split sorts rows."""
    is_final = isinstance(batch, MicroBatches) or cut.cut is None
    return cut if is_final else derived(split).cut_in_arrival_order(batch, cut)


WindowSize = int | Callable[[int], int]


def windows(loader: Iterable[Batch], size: WindowSize, *, whole: bool = False) -> "Windows":
    """Group a loader that yields micro-batches into batches of several, for `Update` and `Accumulator`.

    Args:
        loader: Yields micro-batches.
        size: Number of micro-batches per update, or a function of the update number that returns it. Updates are counted
            from 0 over all epochs. The last batch of an epoch may be shorter.
        whole: Never cut a micro-batch further; if memory runs out, raise instead.

    Returns:
        An iterable of `MicroBatches`, to be iterated once per epoch.

    Raises:
        SplitError: If `size` is not a whole number above 0.

    Example:
        >>> [list(batch) for batch in windows([10, 11, 12, 13, 14], 2)]
        [[10, 11], [12, 13], [14]]
        >>> [len(batch) for batch in windows(range(7), lambda update: 1 + update)]
        [1, 2, 3, 1]
    """
    return Windows(loader, size, whole=whole)


class Windows:
    """Iterable of `MicroBatches`, made by `windows`. `update` is the number of the next one, over all epochs.

    Args:
        loader: Yields micro-batches.
        size: Number of micro-batches per update, or a function of the update number.
        whole: Never cut a micro-batch further.
    """

    def __init__(self, loader: Iterable[Batch], size: WindowSize, *, whole: bool = False) -> None:
        self.loader = loader
        self.whole = whole
        self.size = size
        self.update = 0
        self._size_at(0)

    def __repr__(self) -> str:
        return called("Windows", name_of(self.loader), size=self.size)

    def __iter__(self) -> Iterator[MicroBatches]:
        micro_batches = iter(self.loader)
        while group := tuple(islice(micro_batches, self._size_at(self.update))):
            self.update += 1
            yield MicroBatches(group, whole=self.whole)

    def __len__(self) -> int:
        """Return the number of batches of the next pass over the loader."""
        if not isinstance(self.loader, Sized):
            raise TypeError(f"the loader, a {type(self.loader).__name__}, has no length, so its windows have none.")
        left, update = len(self.loader), self.update
        while left > 0:
            left -= self._size_at(update)
            update += 1
        return update - self.update

    def _size_at(self, update: int) -> int:
        size = self.size(update) if callable(self.size) else self.size
        if isinstance(size, bool) or not isinstance(size, Integral) or size < 1:
            raise SplitError(
                f"windows: size is {size!r} at update {update}; it must be a whole number of micro-batches, 1 or more."
            )
        return int(size)

"""Splits cut a batch into micro-batches: `Split`, the base class, and `Rows`; `windows` groups a loader's micro-batches.

`MicroBatches` is a batch that was cut; `Dealt` is one rank's part of a batch. Rows that belong together are named by
`groups`. After an out-of-memory error, `smaller` finds the split to use next.
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
    """The rows of each micro-batch, in the order they run: longest first, so that what does not fit fails at once."""

    rows: tuple[tuple[int, ...], ...]
    """Row numbers of each micro-batch, ascending; together every row of the batch, once."""
    lengths: tuple[int, ...]
    """Longest row of each micro-batch, to which it is padded."""

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
    """A batch already cut: micro-batches in the order they run.

    `Accumulator` and `Update` take one as they take a batch. With `whole`, no micro-batch is ever cut further: where memory
    runs out, that is an error, not half of rows that belong together.
    """

    micro_batches: tuple[Batch, ...]
    cut: Cut | None
    """Which rows of the batch each micro-batch holds, and what they are padded to; None where rows are in their own order."""
    whole: bool
    """True where no micro-batch may be cut further."""
    together: int
    """How many rows belong together, at most: no micro-batch is cut below that."""

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
        """The rows of the batch that each micro-batch holds: as it was cut, or else consecutive."""
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
    """One rank's part of a batch that several ranks share.

    `Accumulator` and `Update` take one as they take a batch. A rank that was dealt no row has `row_numbers == ()` and a
    `batch` of one stand-in row, the first of the whole batch: it takes part in forward, backward and every synchronisation,
    and counts for nothing.
    """

    batch: Batch
    """This rank's rows, collated; or the stand-in."""
    row_numbers: tuple[int, ...]
    """Which rows of the whole batch these are, in the order of `batch`."""
    num_rows: int
    """Rows of the whole batch, over all ranks."""

    __repr__ = one_line

    @property
    def is_stand_in(self) -> bool:
        """True where this rank was dealt no row."""
        return not self.row_numbers

    def pin_memory(self) -> "Dealt":
        """Pin the memory of every tensor, as a loader with `pin_memory=True` asks for."""
        return replace(self, batch=map_tensors(self.batch, Tensor.pin_memory))


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Model, objective, optimizer and options of an `Update`: all that its memory depends on, beside the batch."""

    model: Any
    objective: Any
    optimizer: Any = None
    """None where the caller steps the optimizer."""
    options: Any = None
    """Its options, as one value."""


Learn = Callable[[MicroBatches, Sequence[float | None]], None]
"""Called when the batch that was cut last has run, with seconds per micro-batch; None stands for one that was left out."""


@runtime_checkable
class CutsBatches(Protocol):
    """Anything that cuts batches: a `Split`, or a class of the user's own that has `cut`."""

    def cut(self, batch: Batch) -> MicroBatches: ...


class Split:
    """A policy that cuts a batch; every row lands in exactly one micro-batch.

    A split of your own derives from it and has `cut`. All else has a default, and may be overridden.
    """

    __slots__ = ()

    collate: Callable[[list[Any]], Batch] | None = None
    """Collates the samples of a micro-batch, where batches are lists of raw samples."""
    groups: Any = None
    """Which rows belong together."""
    batch_dim: int | None = None
    """The dim that is the rows, where somebody said so."""

    def cut(self, batch: Batch) -> MicroBatches:
        """Cut `batch` into micro-batches, in the order they run."""
        raise NotImplementedError(f"{type(self).__name__} has no cut(batch), which returns MicroBatches.")

    def cut_in_arrival_order(self, batch: Batch, like: MicroBatches) -> MicroBatches:
        """Cut without sorting rows, no micro-batch larger than the largest of `like`; for splits that sort rows."""
        return like

    def shrink(self, ran: MicroBatches) -> "Split | None":
        """Return the split to use after `ran` did not fit: micro-batches of about half the size; None if there is none."""
        return None

    @property
    def choose_for(self) -> Callable[[Workload, Batch], None] | None:
        """Called with the workload before each batch is cut, by a split that chooses its size by it."""
        return None

    @property
    def learn(self) -> Learn | None:
        """Called with the times of micro-batches; None where nobody need time them."""
        return None

    @property
    def resized(self) -> "Callable[[int], Split] | None":
        """Returns the same split with micro-batches of at most so much; None for a split that knows no sizes."""
        return None

    @property
    def bound(self) -> int:
        """The largest micro-batch that batches like the last one may be cut to; 0 if the split does not say."""
        return 0

    @property
    def need(self) -> str | None:
        """Memory that an update with a single row was predicted to take, in words."""
        return None

    @property
    def reads_dim_0(self) -> bool:
        """True where dim 0 is taken for the rows, and nobody said that it is."""
        return False

    @property
    def sums(self) -> str:
        """The dtype that gradients are summed in under `sums="auto"`: "fp32" or "param"."""
        return "fp32"


class OwnSplit(Split):
    """A split of the user's own that does not derive from `Split`: its own attributes, and the defaults for the rest."""

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
    """Return the split itself if it derives from `Split`, else wrap it so that it has all that a split may do."""
    return split if isinstance(split, Split) else OwnSplit(split)


MicroBatch = int | Split | CutsBatches | Literal["auto"]
"""A number of rows, a split, or "auto"."""


def as_split(micro_batch: MicroBatch) -> Split:
    """Read `micro_batch=`: an int is `Rows(int)`, "auto" a search by rate up to what `Fit()` allows."""
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
    """`parts` blocks of rows; row k of each block belongs with row k of all others, as in [chosen; rejected]."""

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
    told = groups(batch)
    keys = list(told.tolist() if hasattr(told, "tolist") else told)
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
        return self.collate is None and self.batch_dim is None

    def count(self, batch: Batch) -> int:
        """Count the rows of a whole batch."""
        if self.collate is not None:
            return len(samples_of(batch, "Rows"))
        return rows_to_cut(rows_first(batch, self.batch_dim) if self.batch_dim else batch)

    def least(self, batch: Batch) -> int:
        """Count the fewest rows that a micro-batch of `batch` can hold: those of its largest group."""
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
        """Halve `size`, or the rows of the whole batch where it has fewer; no group is torn."""
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
    """Return the sizes of ceil(count / size) parts, all full but the last; one that is too short gets some from the one before.

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
    """Collate samples; where `collate` returns a list of as many, mark it as one sample per row."""
    made = collate(samples)
    return as_samples(made) if type(made) is list and len(made) == len(samples) else made


@dataclass(frozen=True, slots=True)
class AsGiven(Split):
    """The split of batches that came cut already: it leaves them as they are."""

    def cut(self, batch: Batch) -> MicroBatches:
        assert isinstance(batch, MicroBatches)
        return batch


@dataclass(frozen=True, slots=True)
class CutFurther(Split):
    """The micro-batches of another split, in its order, those of more than `size` rows cut into near-equal parts.

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
        # a batch that a split cut was read then; micro-batches that the user gave are read here for the first time
        count = rows_to_cut(micro_batch) if isinstance(self.split, AsGiven) else num_rows(micro_batch)
        return split_rows(micro_batch, near_equal(count, self.size)) if count > self.size else [micro_batch]


def size_that_ran(split: Split, ran: MicroBatches) -> int:
    """Measure the largest of these micro-batches in what the split counts: tokens where it cut by them, else rows."""
    if ran.cut is not None and not isinstance(split, CutFurther):
        return ran.cut.largest
    return max(len(rows) for rows in ran.row_numbers)


def smaller(split: CutsBatches, ran: MicroBatches) -> Split | None:
    """Return the split to use after `ran`, which `split` cut, did not fit; None where no micro-batch can be smaller.

    A split that has `shrink` decides itself; the micro-batches of any other are cut in half, unless rows belong together.
    """
    if ran.whole:
        return None
    split = derived(split)
    shrunk = split.shrink(ran)
    if shrunk is not None or ran.together > 1:
        return shrunk
    try:
        most = max(len(rows) for rows in ran.row_numbers)
    except BatchError:
        return None  # micro-batches of the user's own making, whose rows nobody can count
    if most == 1:
        return None
    return CutFurther(split.split if isinstance(split, CutFurther) else split, most // 2)


def is_in_arrival_order(cut: MicroBatches) -> bool:
    """True if the rows were not sorted; those of a group may stand apart."""
    if cut.cut is None:
        return True
    order = [number for numbers in cut.cut.rows for number in (numbers if cut.together == 1 else numbers[:1])]
    return order == sorted(order)


def in_arrival_order(split: CutsBatches, batch: Batch, cut: MicroBatches) -> MicroBatches:
    """Return `cut`, which `split` made, or cut anew where the split sorts rows."""
    is_final = isinstance(batch, MicroBatches) or cut.cut is None
    return cut if is_final else derived(split).cut_in_arrival_order(batch, cut)


WindowSize = int | Callable[[int], int]


def windows(loader: Iterable[Batch], size: WindowSize, *, whole: bool = False) -> "Windows":
    """Group a loader that yields micro-batches into `MicroBatches` of `size` each; the last is as short as it is.

    With `whole`, they are never cut further, where their rows belong together.

    `size` may be a function of the update number, which starts at 0 and goes on counting when the result is iterated
    again for the next epoch: a schedule of batch sizes.

    >>> [list(batch) for batch in windows([10, 11, 12, 13, 14], 2)]
    [[10, 11], [12, 13], [14]]
    >>> [len(batch) for batch in windows(range(7), lambda update: 1 + update)]
    [1, 2, 3, 1]
    """
    return Windows(loader, size, whole=whole)


class Windows:
    """An iterable of `MicroBatches`; `update` is the number of the next one, over all epochs. Set it to resume."""

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
        """How many windows the next pass over the loader gives."""
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

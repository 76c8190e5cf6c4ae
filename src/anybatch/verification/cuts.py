"""The cuts that a batch is tried in: that which trains, and one whose micro-batches differ in size."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from anybatch.core import (
    Batch,
    Cut,
    MicroBatch,
    MicroBatches,
    Rows,
    Workload,
    as_split,
    join_rows,
    num_rows,
    rows_first,
    take_rows,
)
from anybatch.errors import BatchError, SplitError, VerifyError
from anybatch.ragged import Tokens

TOO_FEW = (
    "this batch has no uneven cut: all its micro-batches are of one size, and then a mean of means is exact too. Give 3 rows "
    "or more to be sure of the units."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedCut:
    """One way to cut the batch."""

    name: str
    cut: MicroBatches
    decides: bool = True
    """False of a cut that nobody trains with: what it shows is a note."""


def whole_batch(batch: Batch, micro_batch: MicroBatch | None) -> Batch:
    """All rows in one piece, rows first: micro-batches joined, raw samples collated."""
    if getattr(batch, "whole", False):
        raise VerifyError(
            "this batch cannot be verified: its micro-batches must stay whole, and verify compares them with all rows in one "
            "go. Verify a batch with rows first, each by itself."
        )
    try:
        if isinstance(batch, MicroBatches):
            return join_rows(batch.micro_batches)
        if isinstance(micro_batch, Rows | Tokens) and micro_batch.collate is not None:
            return micro_batch.collate(list(batch))
    except BatchError as error:
        raise VerifyError(
            f"the micro-batches cannot be joined to the whole batch that they are compared with: {error} Give the batch itself."
        ) from error
    dim = getattr(micro_batch, "batch_dim", None)
    return rows_first(batch, dim) if dim else batch


def cuts_of(
    given: Batch,
    whole: Batch,
    micro_batch: MicroBatch | None,
    rows: Sequence[int] | None = None,
    *,
    workload: Workload,
) -> tuple[list[TriedCut], list[str]]:
    """The cut that trains, an uneven one where that is even, and by tokens as a note; and what is to be said about them.

    `rows` are those of the given batch that `whole` holds, where it does not hold all of them.
    """
    cuts: list[TriedCut] = []
    trained = _trained(given, whole, micro_batch, rows, workload)
    if trained is not None and (len(trained.cut) > 1 or trained.cut.cut is not None):
        cuts.append(trained)
    uneven = _uneven(whole, micro_batch, None if trained is None else trained.cut)
    if uneven is not None:
        cuts.append(uneven)
    notes = [] if _has_uneven(cuts) else [TOO_FEW]
    if not cuts:
        cuts.append(TriedCut(name="rows by 1", cut=Rows(1).cut(whole)))
    by_tokens = None if isinstance(micro_batch, Tokens) else _by_tokens(whole)
    if by_tokens is not None:
        cuts.append(TriedCut(name="by tokens", cut=by_tokens, decides=False))
    return cuts, notes


def uneven_cut(batch: Batch, together: int = 1) -> MicroBatches:
    """A few micro-batches of 2, 3, 4, ... rows, so that no two weights are alike; they begin with 1 row if there are few.

    With `together`, each is so many times as large: neighbours that may belong together are not torn.
    """
    count = num_rows(batch) // together
    sizes: list[int] = []
    left, size = count, 2 if count >= 5 else 1
    while len(sizes) < 3 and left - size > size:
        sizes.append(size)
        left, size = left - size, size + 1
    sizes.append(left)
    stops = (torch.tensor(sizes).cumsum(0) * together).tolist()
    starts = [0, *stops[:-1]]
    return MicroBatches([take_rows(batch, slice(start, stop)) for start, stop in zip(starts, stops, strict=True)])


def untrimmed_cut(batch: Batch, cut: MicroBatches) -> MicroBatches:
    """The same rows together, with all their padding."""
    return MicroBatches([take_rows(batch, list(rows)) for rows in cut.row_numbers], cut.cut)


def cut_by_rows(batch: Batch, parts: Sequence[Sequence[int]]) -> MicroBatches:
    """Micro-batches of these rows."""
    places = Cut(rows=tuple(map(tuple, parts)), lengths=(1,) * len(parts))
    return MicroBatches([take_rows(batch, list(rows)) for rows in parts], places)


def _trained(
    given: Batch, whole: Batch, micro_batch: MicroBatch | None, rows: Sequence[int] | None, workload: Workload
) -> TriedCut | None:
    """As an update would cut it; None where nobody said how."""
    if isinstance(given, MicroBatches):
        return None if rows is not None else TriedCut(name="as given", cut=given)
    if micro_batch is None:
        return None
    split = copy.deepcopy(as_split(micro_batch))  # one that learns must not learn from this
    raw = isinstance(split, Rows | Tokens) and split.collate is not None
    batch = [given[row] for row in rows] if raw and rows else given if raw else whole
    choose_for = getattr(split, "choose_for", None)
    if choose_for is not None:
        choose_for(workload, batch)
    name = f"as configured: {split!r}"
    if isinstance(split, Rows) and split.batch_dim:
        split = replace(split, batch_dim=None)  # rows were put first
    if isinstance(split, Tokens):
        split._has_warned = True
    return TriedCut(name=name, cut=split.cut(batch))


def _uneven(whole: Batch, micro_batch: MicroBatch | None, trained: MicroBatches | None) -> TriedCut | None:
    """Micro-batches of different sizes, where those that train are alike; None where there is no such cut.

    Where there are three or more, all but the first are taken together: so nothing is torn that belongs together.
    """
    groups = getattr(micro_batch, "groups", None)
    if trained is not None and len(trained) > 1:
        if groups is not None and len(trained) == 2:
            split = Rows(1, groups=groups)
            trained = replace(split, size=split.least(whole)).cut(whole)
        if len({len(rows) for rows in trained.row_numbers}) > 1:
            return None
        if len(trained) > 2:
            first, *others = trained.row_numbers
            parts = [sorted(first), sorted(row for rows in others for row in rows)]
            return TriedCut(name=f"uneven: 1 micro-batch and {len(others)} together", cut=cut_by_rows(whole, parts))
    if groups is not None or num_rows(whole) < 3:
        return None
    return TriedCut(name="uneven rows", cut=uneven_cut(whole))


def _has_uneven(cuts: Sequence[TriedCut]) -> bool:
    return any(len({len(rows) for rows in tried.cut.row_numbers}) > 1 for tried in cuts)


def _by_tokens(whole: Batch) -> MicroBatches | None:
    """A third of the padded tokens at a time, by the attention mask; None where there is none, or no padding to cut off."""
    if not isinstance(whole, Mapping) or "attention_mask" not in whole:
        return None
    split = Tokens(1)
    split._has_warned = True
    try:
        measured = split.measure(whole)
    except (SplitError, BatchError):
        return None
    longest = max(measured.lengths)
    cut = split.cut_to(max(longest, len(measured.lengths) * longest // 3), whole, measured)
    return cut if cut.cut is not None and min(cut.cut.lengths) < longest else None

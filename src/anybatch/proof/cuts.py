"""The cuts that a batch is tried in."""

import copy
from collections.abc import Mapping, Sequence

import torch

from anybatch.batches import (
    Batch,
    MicroBatch,
    MicroBatches,
    Rows,
    Tokens,
    Workload,
    as_split,
    join_rows,
    num_rows,
    take_rows,
    why_rows_stay,
)
from anybatch.errors import BatchError, SplitError, VerifyError


def whole_batch(batch: Batch, micro_batch: MicroBatch | None) -> Batch:
    """All rows in one piece: micro-batches joined, raw samples collated."""
    why = why_rows_stay(micro_batch, batch)
    if why is not None:
        raise VerifyError(
            f"this batch cannot be verified: {why}, and verify takes rows one by one. Verify a batch with rows first, each by "
            "itself."
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
    return batch


def cuts_of(
    given: Batch,
    whole: Batch,
    micro_batch: MicroBatch | None,
    rows: Sequence[int] | None = None,
    *,
    workload: Workload,
) -> dict[str, MicroBatches]:
    """Cuts by name, no two of them alike: as configured, rows by 1, by 3, in half, and by tokens where rows have lengths.

    `rows` are those of the given batch that `whole` holds, where it does not hold all of them.
    """
    count = num_rows(whole)
    cuts: dict[str, MicroBatches] = {}
    if isinstance(given, MicroBatches):
        if rows is None:
            cuts["as given"] = given
    elif micro_batch is not None:
        split = copy.deepcopy(as_split(micro_batch))  # one that learns must not learn from this
        raw = isinstance(split, Rows | Tokens) and split.collate is not None
        batch = [given[row] for row in rows] if raw and rows else given if raw else whole
        choose_for = getattr(split, "choose_for", None)
        if choose_for is not None:
            choose_for(workload, batch)
        cuts[f"as configured: {split!r}"] = split.cut(batch)
    for name, size in (("rows by 1", 1), ("rows by 3", 3), ("in half", -(-count // 2))):
        cuts[name] = Rows(size).cut(whole)
    by_tokens = _by_tokens(whole, micro_batch)
    if by_tokens is not None:
        cuts["by tokens"] = by_tokens
    return _different(cuts, count)


def uneven_cut(batch: Batch) -> MicroBatches:
    """A few micro-batches of 2, 3, 4, ... rows, so that no two weights are alike; they begin with 1 row if there are few."""
    count = num_rows(batch)
    sizes: list[int] = []
    left, size = count, 2 if count >= 5 else 1
    while len(sizes) < 3 and left - size > size:
        sizes.append(size)
        left, size = left - size, size + 1
    sizes.append(left)
    stops = torch.tensor(sizes).cumsum(0).tolist()
    starts = [0, *stops[:-1]]
    return MicroBatches([take_rows(batch, slice(start, stop)) for start, stop in zip(starts, stops, strict=True)])


def untrimmed_cut(batch: Batch, cut: MicroBatches) -> MicroBatches:
    """The same rows together, with all their padding."""
    return MicroBatches([take_rows(batch, list(rows)) for rows in cut.row_numbers], cut.cut)


def _by_tokens(whole: Batch, micro_batch: MicroBatch | None) -> MicroBatches | None:
    """A third of the padded tokens at a time, by the split's own lengths or the attention mask."""
    has_mask = isinstance(whole, Mapping) and "attention_mask" in whole
    is_told = isinstance(micro_batch, Tokens) and micro_batch.collate is None
    if not has_mask and not is_told:
        return None
    split = copy.deepcopy(micro_batch) if isinstance(micro_batch, Tokens) and is_told else Tokens(1)
    split._has_warned = True
    try:
        measured = split.measure(whole)
    except SplitError:
        return None
    longest = max(measured.lengths)
    return split.cut_to(max(longest, len(measured.lengths) * longest // 3), whole, measured)


def _different(cuts: dict[str, MicroBatches], count: int) -> dict[str, MicroBatches]:
    kept: dict[str, MicroBatches] = {}
    seen = set()
    for name, cut in cuts.items():
        lengths = None if cut.cut is None or name == "as given" else cut.cut.lengths
        key = cut.row_numbers, lengths
        if key not in seen and (len(cut) > 1 or lengths is not None or count == 1):
            seen.add(key)
            kept[name] = cut
    return kept

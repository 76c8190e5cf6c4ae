"""The self-check of an `Update`: its first batch, before it learns from it."""

import copy
from typing import Any

from torch import nn

from anybatch.batches import Batch, Dealt, MicroBatches, Rows, Tokens, num_rows, take_rows, why_rows_stay
from anybatch.errors import ExactnessError, VerifyError
from anybatch.parallel import unwrapped
from anybatch.passes import Accumulator, has_rows
from anybatch.proof.cases import copy_model, leaving_untouched, make_case
from anybatch.proof.comparing import unit_of, verify
from anybatch.proof.cuts import uneven_cut
from anybatch.proof.floor import largest_floor, relative


def self_check(accumulator: Accumulator, batch: Batch) -> None:
    """Raise `ExactnessError`, with the cause, unless rows of this batch give the same gradient in one go and accumulated.

    As many rows as one micro-batch holds, spread over the batch: so it needs no more memory than the update, but for a copy
    of the model, and costs two passes over one micro-batch. Where these are too far apart, `verify` judges, and looks for the
    cause. With `batch_norm="micro"` the user has chosen other statistics than the batch's; then all else is checked, with
    BatchNorm frozen. Everything is left as it was. Each rank looks at rows of its own, and all raise if one does.
    """
    if accumulator.engine.is_even:
        raise VerifyError(
            "check=True runs a copy of the model, and one sharded by fully_shard cannot be copied. Call verify() on the model "
            "before it is sharded, and use check='off'."
        )
    problem: Exception | None = None
    try:
        _look_at(accumulator, batch)
    except Exception as error:
        problem = error
    is_refused = accumulator.engine.ranks.any(problem is not None)
    if problem is not None:
        raise problem
    if is_refused:
        raise ExactnessError(
            "the self-check of the first batch failed on another rank, which says why; nothing was changed."
        )


def _look_at(accumulator: Accumulator, batch: Batch) -> None:
    sample = _spread_rows(accumulator, batch)
    if sample is None:
        return
    model, objective = unwrapped(accumulator.model), accumulator.objective
    mode = accumulator.running.batch_norm
    options: dict[str, Any] = {
        "batch_norm": "frozen" if mode == "micro" else mode,
        "autocast": accumulator.running.autocast,
    }
    if _is_near(model, accumulator, sample, options):
        return
    verdict = verify(model, objective, sample, **options)
    if not verdict.is_exact:
        raise ExactnessError(
            "the self-check of the first batch found that its accumulated gradient is not the whole batch's; nothing "
            f"was changed. {verdict.describe()}\nMend the cause, or use check='off' to train as it is."
        )


def _is_near(model: nn.Module, accumulator: Accumulator, sample: Batch, options: dict[str, Any]) -> bool:
    with leaving_untouched(model, accumulator.objective):
        case = make_case(copy_model(model), accumulator.objective, sample, **options)
        whole = case.record()
        try:
            accumulated = case.accumulated(uneven_cut(sample))
        except Exception:  # verify says what it was, and whether it matters
            return False
        return relative(whole, accumulated) <= largest_floor(unit_of(case)) / 10


def _spread_rows(accumulator: Accumulator, batch: Batch) -> Batch | None:
    """Rows from all over the batch, as many as its first micro-batch has, at least 2; None for a batch of one row."""
    if isinstance(batch, Dealt):
        batch = batch.batch
    if not has_rows(batch) or why_rows_stay(accumulator.split, batch) is not None:
        return None
    if isinstance(batch, MicroBatches):
        return next((part for part in batch if num_rows(part) > 1), None)
    choose_for = getattr(accumulator.split, "choose_for", None)
    if choose_for is not None:
        choose_for(accumulator.workload, batch)  # what the update would begin with
    split = copy.deepcopy(accumulator.split)  # one that learns must not learn from this
    rows = split.cut(batch).row_numbers
    count, wanted = sum(map(len, rows)), max(2, len(rows[0]))
    if count < 2:
        return None
    chosen = [index * count // wanted for index in range(wanted)]
    if isinstance(split, Rows | Tokens) and split.collate is not None:
        return split.collate([batch[row] for row in chosen])
    return take_rows(batch, chosen)

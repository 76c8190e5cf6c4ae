"""The check of an update's first batch: do the losses of a few rows add up? Forwards only; where not, `verify` decides."""

import copy
import math
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch.batch_norm import Call, batch_norms, replaced, uses_batch_statistics
from anybatch.core import (
    PENDING,
    Accumulator,
    Batch,
    Coupled,
    Dealt,
    DropoutLayer,
    FakeTensor,
    FirstBatchCheck,
    MicroBatches,
    MovingBuffers,
    NormLayer,
    Objective,
    Rows,
    SeenLoss,
    TermLosses,
    autocast_context,
    common_device,
    count_terms,
    count_units,
    free_memory,
    has_rows,
    is_out_of_memory,
    join_rows,
    loss_and_metrics,
    move,
    num_rows,
    once_more,
    outer_random,
    random_state,
    take_rows,
    tensors,
)
from anybatch.dropout import masks_of, rows_running
from anybatch.errors import BatchError, ExactnessError, first_line
from anybatch.objectives import ObservedMeans, WatchedLoss
from anybatch.parallel import unwrapped
from anybatch.ragged import Tokens
from anybatch.verification.case import drawing
from anybatch.verification.draws import Draws
from anybatch.verification.precision import autocast_dtype
from anybatch.verification.state import PythonState, copy_batch, functions_of
from anybatch.verification.verify import verify

TOLERANCE = {torch.float64: 1e-10, torch.float32: 3e-6}
"""Relative error of the loss above which gradients are compared. Lower precisions: 1e-3."""
COARSE = {torch.float64: 1e-9, torch.float32: 2e-4}
"""Relative error above which the loss is wrong even if no gradients can be compared. Lower precisions: 3e-2."""
MOST_ROWS, FEWEST_ROWS = 8, 5
MOST_MICRO_BATCHES = 8
"""Most micro-batches that are compared as they are, if rows do not add up one by one."""
MOST_PARAMETERS = 200_000_000
"""Most parameters of a model that is copied, in float64."""
IGNORED = -100


class NotJudgedError(ExactnessError):
    """The reason why these rows cannot be judged; caught by `check_first_batch`."""


def check_first_batch(accumulator: Accumulator, batch: Batch) -> FirstBatchCheck:
    """Raise `ExactnessError`, with the likely cause, where the losses of a few rows are not those of their parts put together.

        loss(A and B) * (units(A) + units(B)) = loss(A) * units(A) + loss(B) * units(B)

    Rows are at most 8, at most those of one micro-batch, and run forward twice each, without a graph. BatchNorm uses the
    statistics of all of them; random draws are drawn again by row. Where they are further apart than rounding explains,
    `verify` judges their gradients, so that nothing is refused that is exact. What cannot be judged is told by the result. A
    batch that is not cut is exact whatever its loss, and the next one is looked at. Everything is left as it was. Each rank
    looks at its own rows, and all raise if one does.
    """
    if accumulator.parallelism.needs_equal_passes:
        return FirstBatchCheck(finding="not judged", reason="the model is sharded, and a forward of it takes all ranks")
    found, problem = PENDING, None
    try:
        found = _look(accumulator, batch)
    except Exception as error:
        problem = error
    is_refused = accumulator.parallelism.ranks.any(problem is not None)
    if problem is not None:
        raise problem
    if is_refused:
        raise ExactnessError("the look at the first batch failed on another rank, which says why; nothing was changed.")
    return found


def _look(accumulator: Accumulator, batch: Batch) -> FirstBatchCheck:
    try:
        if isinstance(next(accumulator.model.parameters(), None), FakeTensor):
            return FirstBatchCheck(finding="not judged", reason="the model has no numbers")
        sample = _choose_rows(accumulator, batch)
        if sample is None:
            return PENDING
        return _judge(accumulator, _Forwards(accumulator, sample), batch)
    except NotJudgedError as error:
        return FirstBatchCheck(finding="not judged", reason=str(error))
    except ExactnessError:
        raise
    except Exception as error:  # what is wrong with the batch or the model, the update itself will say
        reason = first_line(error)
        is_memory = is_out_of_memory(error)
    if is_memory:
        free_memory()
    return FirstBatchCheck(finding="not judged", reason=reason)


def _judge(accumulator: Accumulator, forwards: "_Forwards", batch: Batch) -> FirstBatchCheck:
    with forwards.undone():
        whole = forwards.whole()
        if not whole.is_finite:
            raise NotJudgedError("the loss is not finite")
        dtype = _dtype(accumulator, whole)
        coarse = COARSE.get(dtype, 3e-2)
        tolerance = TOLERANCE.get(dtype, 1e-3) if forwards.can_copy else coarse
        worst, pieces = _apart(forwards, whole)
        is_off = worst.error > tolerance or worst.units_differ
        if (
            is_off
            and _distance(whole, forwards.part(forwards.sample.all_rows)) > tolerance / 10
            and not forwards.left()
        ):
            raise NotJudgedError(
                "the same rows give another loss when they run again: something draws, or remembers, unseen"
            )
        if is_off and _is_exact_as_cut(accumulator, batch, tolerance):
            is_off = False
        is_sound = not is_off and not _has_state(forwards, tolerance)
        message = None if is_sound else _verdict(accumulator, forwards, worst, coarse, pieces)
    left = ", ".join(forwards.left()[:4])
    if message is None:
        told = left and f"its forwards changed {left}, outside of the model, where nothing is put back"
        return FirstBatchCheck(finding="passed", error=worst.error, reason=told)
    raise ExactnessError(
        "the first batch shows that the accumulated gradient is not the whole batch's; nothing "
        f"{left and f'but {left} '}was changed. "
        f"{_looked(forwards.sample, worst, whole)} {message}\nMend the cause; verify(model, objective, batch) shows more. "
        "check='off' trains as it is."
    )


def _dtype(accumulator: Accumulator, whole: "_Measured") -> torch.dtype:
    """The coarsest precision that the loss passed through."""
    fast = autocast_dtype(accumulator.options.autocast)
    held = [parameter.dtype for parameter in accumulator.model.parameters()]
    floats = [dtype for dtype in {*held, whole.dtype, *([fast] if fast else [])} if dtype.is_floating_point]
    return max(floats, key=lambda dtype: torch.finfo(dtype).eps)


def _apart(forwards: "_Forwards", whole: "_Measured") -> "tuple[_Difference, tuple[_Piece, ...]]":
    """Return how far the parts are from the whole, at worst, and the parts to compare gradients of.

    Parts that have nothing to show, or may be right by accident, are followed by others.
    """
    compared = forwards.sample.ways[0]
    worst = _Difference(name="loss", error=0.0, whole=0.0, together=0.0)
    has_failed = False
    for pieces in forwards.sample.ways:
        try:
            parts = [forwards.part(piece) for piece in pieces]
        except NotJudgedError:
            raise
        except Exception as error:  # rows that cannot run by themselves are no rows
            if is_out_of_memory(error):
                raise
            has_failed = True
            continue
        has_failed = not all(part.is_finite for part in parts)
        if not has_failed:
            order = [number for piece in pieces for number in piece.rows]
            worst = max([worst, *_differences(whole, parts, order)], key=lambda one: (one.units_differ, one.error))
            if _may_be_right_by_accident(parts, pieces):
                compared = forwards.sample.ways[-1]
            elif all(part.shows for part in parts):
                return worst, compared
    if has_failed:
        value = whole.values[0].value if whole.values else 0.0
        return _Difference(name="loss", error=float("inf"), whole=value, together=float("nan")), compared
    return worst, compared


def _may_be_right_by_accident(parts: Sequence["_Measured"], pieces: Sequence["_Piece"]) -> bool:
    """True if parts of different size have equal units: then a count such as 1 may fit these parts, and no others."""
    columns = zip(*(part.values for part in parts), strict=True)
    is_equal = any(len({one.units for one in column}) == 1 and column[0].adds_up == "mean" for column in columns)
    return is_equal and len({len(piece.rows) for piece in pieces}) > 1


def _is_exact_as_cut(accumulator: Accumulator, batch: Batch, tolerance: float) -> bool:
    """True where rows do not add up one by one, but the micro-batches do: those that belong together lie in one."""
    sample = _whole_micro_batches(accumulator, batch, MOST_MICRO_BATCHES)
    if sample is None:
        return False
    forwards = _Forwards(accumulator, sample)
    with forwards.undone():
        whole = forwards.whole()
        ways = [[forwards.part(piece) for piece in pieces] for pieces in sample.ways]
    found = [one for parts in ways for one in _differences(whole, parts, range(sample.num_rows))]
    is_near = all(one.error <= min(tolerance, 1e-3) and not one.units_differ for one in found)
    return is_near and whole.is_finite and all(part.is_finite and part.shows for parts in ways for part in parts)


def _has_state(forwards: "_Forwards", tolerance: float) -> bool:
    """True where what Python code left behind in the forward of some rows changes the loss of others."""
    if not forwards.changed:
        return False
    first, second, *_ = forwards.sample.ways[0]
    return _distance(forwards.part(second), forwards.after(first, second)) > tolerance


def _distance(one: "_Measured", other: "_Measured") -> float:
    pairs = [(a.value, b.value) for a, b in zip(one.values, other.values, strict=True)]
    pairs += [(float(a.norm()), float((a - b).norm() + a.norm())) for a, b in zip(one.rows, other.rows, strict=True)]
    return max((abs(a - b) / max(abs(a), abs(b)) for a, b in pairs if a != b), default=0.0)


def _verdict(
    accumulator: Accumulator, forwards: "_Forwards", worst: "_Difference", coarse: float, pieces: "Sequence[_Piece]"
) -> str | None:
    """Compare the gradients of these rows, cut into `pieces`; return the message, or None if they are exact."""
    sample, split = forwards.sample, accumulator.split
    by_tokens = isinstance(split, Tokens) and split.collate is None
    try:
        if not forwards.can_copy:
            return _without_proof(forwards, worst, coarse, f"more than {MOST_PARAMETERS:,} parameters")
        verdict = verify(
            forwards.model,
            forwards.objective,
            sample.batch if by_tokens else MicroBatches([piece.batch for piece in pieces]),
            micro_batch=split if by_tokens else None,
            batch_norm="exact" if accumulator.options.batch_norm == "exact" else "frozen",
            autocast=accumulator.options.autocast,
        )
    except Exception as error:  # a model that cannot be copied, say
        return _without_proof(forwards, worst, coarse, first_line(error))
    in_float64 = [cut for cut in verdict.cuts if cut.precision == "float64"]
    if all(cut.is_exact for cut in in_float64 or verdict.cuts):  # what only rounding explains is no mistake
        return None
    known = [cause for cause in verdict.causes if cause.kind != "unknown"]
    causes = [f"\ncause ({cause.kind}): {cause.explanation}\nfix: {cause.fix}" for cause in known]
    told = "".join(causes) or f"\ncause, likely (coupled): {_COUPLED}"  # no count of units mends it
    return f"The gradient of these rows is {verdict.error:.1e} off.{told}"


def _without_proof(forwards: "_Forwards", worst: "_Difference", coarse: float, why: str) -> str:
    """Judge by the loss alone: the likely cause, if it is further off than another order of the rows makes it."""
    numbers = range(forwards.sample.num_rows - 1, -1, -1)
    backwards = forwards.part(_Piece(tuple(numbers), take_rows(forwards.sample.batch, list(numbers))))
    pairs = zip(forwards.whole().values, backwards.values, strict=True)
    noise = max((abs(a.value - b.value) for a, b in pairs), default=0.0)
    if worst.error <= coarse or abs(worst.whole - worst.together) <= 20 * noise:
        raise NotJudgedError(f"the loss is {worst.error:.1e} off, and its gradient could not be compared ({why})")
    if worst.is_sum:
        told = "(sum): the loss is a sum over rows, not a mean: give reduction='sum', or return the mean."
    elif worst.is_between:
        told = "(units): the loss is a mean over something other than the units given: give units=, a function of the batch."
    else:
        told = f"(coupled): {_COUPLED}"
    return f"\ncause, likely {told}"


_COUPLED = (
    "what comes out for some rows depends on the others: a statistic of the batch, a ratio or a power of a mean, a "
    "comparison of rows.\nfix: Give Coupled(encode, loss), with all that looks at several rows in loss(representations); "
    "Terms(...) where means with different units are added up."
)


def _looked(sample: "_Sample", worst: "_Difference", whole: "_Measured") -> str:
    sizes = " and ".join(str(len(piece.rows)) for piece in sample.ways[0])
    what = worst.name if worst.name == "loss" or whole.rows else f"term {worst.name!r}"
    if whole.rows:
        return f"Of {sample.num_rows} rows in one go {what} is {worst.error:.1e} away from that of {sizes} of them."
    return (
        f"Of {sample.num_rows} rows in one go the {what} is {worst.whole:.6g}; put together from {sizes} of them it is "
        f"{worst.together:.6g}, {worst.error:.1e} off."
    )


class _Piece(NamedTuple):
    """Some rows of a sample, by their numbers in it."""

    rows: tuple[int, ...]
    batch: Batch


@dataclass(frozen=True, slots=True)
class _Sample:
    """Some rows of a batch in one go, and ways to take them apart."""

    batch: Batch
    ways: tuple[tuple[_Piece, ...], ...]
    """The first is that which shows most; another is for where a part of it has nothing to show."""

    @property
    def num_rows(self) -> int:
        return sum(len(piece.rows) for piece in self.ways[0])

    @property
    def all_rows(self) -> _Piece:
        return _Piece(tuple(range(self.num_rows)), self.batch)


def _choose_rows(accumulator: Accumulator, batch: Batch) -> _Sample | None:
    """Rows as different from each other as the batch has them; None where it is not cut, and any loss is exact."""
    given = batch.batch if isinstance(batch, Dealt) else batch
    if (isinstance(batch, Dealt) and batch.is_stand_in) or not has_rows(given):
        raise NotJudgedError("this rank has no rows")
    is_alone = accumulator.parallelism.ranks.size == 1
    split = accumulator.split
    if isinstance(given, MicroBatches):
        if len(given) == 1 and is_alone:
            return None
        why = "it has one micro-batch" if len(given) == 1 else "its micro-batches cannot be joined to one"
        return _found(_whole_micro_batches(accumulator, given), why)
    size = _size_of_micro_batches(accumulator, given)
    if size is None and is_alone:
        return None
    if getattr(split, "batch_dim", 0):
        raise NotJudgedError("its rows are not in dim 0")
    if getattr(split, "groups", None) is not None:
        return _found(_whole_micro_batches(accumulator, given), "its groups cannot be joined to one micro-batch")
    collate = getattr(split, "collate", None)
    if collate is None:
        return _sample(given, _num_wanted(num_rows(given), size or MOST_ROWS), split)
    samples = [given[row] for row in _spread_evenly(len(given), _num_wanted(len(given), size or MOST_ROWS))]
    whole = collate(samples)
    return _sample(whole, num_rows(whole))


def _found(sample: _Sample | None, why: str) -> _Sample:
    if sample is None:
        raise NotJudgedError(why)
    return sample


def _whole_micro_batches(accumulator: Accumulator, batch: Batch, most: int = 3) -> _Sample | None:
    """The first micro-batches as they will run, against one with all their rows; None where they cannot be joined.

    The first against all others, so that they differ in size; and each by itself.
    """
    given = batch.batch if isinstance(batch, Dealt) else batch
    cut = given if isinstance(given, MicroBatches) else copy.deepcopy(accumulator.split).cut(given)
    first, *others = sorted(cut, key=num_rows)[:most]
    if not others:
        return None
    try:
        ways = [[first, join_rows(others)], [first, *others]]
        whole = join_rows(ways[0])
    except BatchError:
        return None
    return _Sample(whole, tuple(_in_order(parts) for parts in ways))


def _in_order(parts: Sequence[Batch]) -> tuple[_Piece, ...]:
    spans = pairwise([0, *accumulate(map(num_rows, parts))])
    return tuple(_Piece(tuple(range(start, stop)), part) for part, (start, stop) in zip(parts, spans, strict=True))


def _size_of_micro_batches(accumulator: Accumulator, batch: Batch) -> int | None:
    """How many rows the first micro-batch will have; None where it has all of them."""
    split = accumulator.split
    if split == Rows(getattr(split, "size", 1)):  # with nothing that says what a row is
        return split.size if num_rows(batch) > split.size else None
    choose_for = getattr(split, "choose_for", None)
    if choose_for is not None:
        choose_for(accumulator.workload, batch)  # what the update begins with
    rows = copy.deepcopy(accumulator.split).cut(batch).row_numbers  # one that learns must not learn from this
    return len(rows[0]) if len(rows) > 1 else None


def _num_wanted(count: int, size: int) -> int:
    """Rows of one micro-batch, 8 at most; if it is small, 5, but never half of the batch."""
    wanted = max(FEWEST_ROWS, min(size, MOST_ROWS))
    return min(count, max(2, min(wanted, 2 * count // 5)))


def _sample(batch: Batch, wanted: int, split: object = None) -> _Sample:
    """So many rows, in parts that differ most."""
    if wanted < 2:
        raise NotJudgedError("the batch has one row")
    count = num_rows(batch)
    order = _by_kind(batch, count)
    chosen = take_rows(batch, [order[place] for place in _spread_evenly(count, wanted)])
    few = 2 if wanted > 3 else 1
    numbers = tuple(range(wanted))
    mixed = numbers[1::3] if wanted > 3 else (wanted - 1,)
    rest = tuple(number for number in numbers if number not in mixed)
    ways = [(numbers[:few], numbers[few:]), (mixed, rest)]
    return _Sample(
        chosen, tuple(tuple(piece for rows in way for piece in _pieces(chosen, rows, split)) for way in ways)
    )


def _pieces(sample: Batch, rows: Sequence[int], split: object) -> list[_Piece]:
    """These rows; cut by tokens, as the split trims them."""
    part = take_rows(sample, list(rows))
    if not isinstance(split, Tokens):
        return [_Piece(tuple(rows), part)]
    split = copy.deepcopy(split)
    split._has_warned = True
    cut = split.cut(part)
    places = zip(cut.row_numbers, cut, strict=True)
    return [_Piece(tuple(rows[number] for number in numbers), trimmed) for numbers, trimmed in places]


def _spread_evenly(count: int, wanted: int) -> list[int]:
    """Numbers from the first to the last, evenly."""
    wanted = min(wanted, count)
    return [round(index * (count - 1) / max(wanted - 1, 1)) for index in range(wanted)]


def _by_kind(batch: Batch, count: int) -> list[int]:
    """Sort the rows by what a count may depend on: entries that are ignored, that are 0, then classes, then weights."""
    columns = [column.detach().reshape(count, -1) for column in tensors(batch) if column.dim() and len(column) == count]
    columns = [column for column in columns if column.numel() and not column.is_complex()]
    whole = [column for column in columns if not column.is_floating_point()]
    narrow = [column for column in columns if column.is_floating_point() and column.shape[1] == 1]
    keys = [_sum([(column == IGNORED).sum(1) for column in whole], count)]
    keys += [_sum([(column == 0).sum(1) for column in whole], count)]
    keys += [_sum([column.sum(1) for column in columns], count) for columns in (whole, narrow)]
    return sorted(range(count), key=list(zip(*keys, strict=True)).__getitem__)


def _sum(each: list[Tensor], count: int) -> list[float]:
    if not each:
        return [0.0] * count
    total = torch.stack([one.to(torch.float64 if one.device.type != "mps" else torch.float32) for one in each]).sum(0)
    listed: list[float] = total.tolist()
    return listed


class _Forwards:
    """Forwards of a sample's rows, each from the state in which the first one started."""

    def __init__(self, accumulator: Accumulator, sample: _Sample) -> None:
        self.model: nn.Module = unwrapped(accumulator.model)
        self.objective: Objective | Coupled = accumulator.objective
        self.sample = sample
        self._options = accumulator.options
        self._device = common_device(self.model.parameters())
        self._masks = masks_of(self.model)
        self._norms = _RememberedNorms(self.model, is_frozen=self._options.batch_norm == "frozen")
        own_loss = [self.objective.loss] if isinstance(self.objective.loss, nn.Module) else []
        self._buffers = MovingBuffers([self.model, *own_loss])
        self._buffers_before = self._buffers.snapshot()
        self._python = PythonState()
        self._random = random_state({parameter.device for parameter in self.model.parameters()})
        self._outer = outer_random()
        self._draws: Draws | None = None
        self._has_graph = isinstance(self.objective.loss, WatchedLoss)
        """An observed divisor needs means with a gradient; no backward pass runs even so."""
        self._may_have_drawn = True
        """From Python's and NumPy's generators: False once all rows have run and have not."""
        self.changed: list[str] = []
        """Names of Python state that the first forward changed."""

    @property
    def can_copy(self) -> bool:
        return sum(parameter.numel() for parameter in self.model.parameters()) <= MOST_PARAMETERS

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Restore everything after the block."""
        masks = self._masks
        kept = None if masks is None else (masks.strict, masks.is_watched, masks.last)
        # without torch's own dropout, rows that draw nothing else are compared as they are; swapped layers draw by row
        stock = [one for one in self.model.modules() if isinstance(one, DropoutLayer) and one.training]
        dropouts = [module for module in stock if type(module).__module__.startswith("torch.nn.")]
        try:
            for module in dropouts:
                module.training = False
            self._python = PythonState(self.model, *functions_of(self.objective), owned=[*self.model.modules()])
            if masks is not None:
                masks.strict = False  # who draws is seen here
            with warnings.catch_warnings(), ExitStack() as stack:
                warnings.simplefilter("ignore")
                if "torch._dynamo" in sys.modules:  # a few rows are no shapes to compile for
                    stack.enter_context(torch.compiler.set_stance("force_eager"))
                yield
        finally:
            once_more(self._put_back)
            if self._may_have_drawn:
                self._outer.restore()
            for module in dropouts:
                module.training = True
            if masks is not None and kept is not None:
                masks.strict, masks.is_watched, masks.last = kept

    def left(self) -> list[str]:
        """Names of what forwards changed outside of the model (closures, globals, default arguments): it is not put back."""
        return self._python.changed(is_left=True)

    def whole(self) -> "_Measured":
        """All rows in one go. What they draw is kept, where it can be, for the parts to draw again."""
        measured = self._run_whole()
        drawn = self._outer.moved()
        self._may_have_drawn = bool(drawn)
        if drawn:
            raise NotJudgedError(f"the loss draws from {' and '.join(drawn)}, which cannot be drawn again by row")
        has_drawn = not self._random.is_now()
        if has_drawn:
            self._put_back()
            self._draws = Draws(self.sample.num_rows)
            measured = self._run_whole()
        self.changed = self._python.changed()
        self._put_back()
        if has_drawn:
            self._refuse_permutations()
        return measured

    def after(self, first: _Piece, second: _Piece) -> "_Measured":
        """Some rows, after others have run and Python code has kept what it changed; buffers are put back between."""
        self._run(first.batch, first.rows)
        self._buffers.put_back(self._buffers_before)
        return self.part(second)

    def part(self, piece: _Piece) -> "_Measured":
        """Some of the rows."""
        measured = self._run(piece.batch, piece.rows)
        self._put_back()
        if self._draws is not None and self._draws.strange:
            raise NotJudgedError(f"random draws cannot be drawn again by row: {self._draws.strange[0]}")
        return measured

    def _put_back(self) -> None:
        self._python.put_back()
        self._buffers.put_back(self._buffers_before)

    def _run_whole(self) -> "_Measured":
        try:
            return self._run(self.sample.batch, None)
        except RuntimeError:
            if self._has_graph:
                raise
            self._has_graph = True  # a loss that takes gradients itself
            self._put_back()
            return self._run(self.sample.batch, None)

    def _run(self, given: Batch, rows: Sequence[int] | None) -> "_Measured":
        batch = copy_batch(given)  # a forward may write into it
        batch = batch if self._device is None else move(batch, self._device)
        objective = self.objective
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self._has_graph))
            if self._options.autocast is not None:
                stack.enter_context(copy.copy(autocast_context(self._options.autocast, self._device)))
            if self._norms.layers:
                stack.enter_context(self._norms.running(is_first=rows is None))
            if self._draws is not None:
                if rows is None:
                    self._draws.whole.clear()
                stack.enter_context(drawing(self._draws, rows))
            if self._masks is not None:
                stack.enter_context(rows_running(self.model, range(self.sample.num_rows) if rows is None else rows))
            if isinstance(objective, Coupled):
                return _measure_rows(objective.encode(self.model, batch))
            observed = stack.enter_context(ObservedMeans())
            return _measure(objective, self.model, batch, objective.loss(self.model, batch), observed)

    def _refuse_permutations(self) -> None:
        """Drawn numbers that are themselves numbers of rows mean other rows in a part."""
        for draw in self._draws.whole if self._draws is not None else ():
            numbers = draw.numbers
            if numbers.is_floating_point() or numbers.dtype is torch.bool:
                continue
            if "randperm" in draw.operation or "multinomial" in draw.operation:
                raise NotJudgedError(f"{draw.operation} draws an order or a choice among the rows")
            if not numbers.is_cpu and numbers.numel() and numbers.max() < self.sample.num_rows:
                raise NotJudgedError(f"{draw.operation} may draw numbers of rows")


class _RememberedNorms:
    """BatchNorm layers of a model that normalise any rows by the statistics of all of them.

    The first forward keeps its statistics, layer by layer and call by call, and later ones use them: rows are judged as
    `batch_norm="exact"` has them, and whatever else couples them is seen. Running statistics do not move.
    """

    def __init__(self, model: nn.Module, *, is_frozen: bool) -> None:
        self.layers = {name: layer for name, layer in batch_norms(model).items() if uses_batch_statistics(layer)}
        self._is_frozen = is_frozen
        self._statistics: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def running(self, *, is_first: bool) -> AbstractContextManager[None]:
        """A forward with the running statistics if they are frozen; else the first one, or one of some of its rows."""
        if is_first:
            self._statistics = {name: [] for name in self.layers}
        left = {name: iter(kept) for name, kept in self._statistics.items()}

        def compute(name: str, layer: NormLayer, call: Call) -> Tensor:
            if self._is_frozen:
                assert call.running_mean is not None
                assert call.running_var is not None
                mean, var = call.running_mean, call.running_var
            elif not is_first:
                mean, var = next(left[name])
            else:
                dims = [dim for dim in range(call.input.dim()) if dim != 1]
                inputs = call.input.float() if call.input.itemsize < 4 else call.input
                var, mean = torch.var_mean(inputs, dims, correction=0)
                self._statistics[name].append((mean, var))
            like = next(held for held in (call.running_mean, call.weight, call.input) if held is not None)
            mean, var = mean.to(like.dtype), var.to(like.dtype)
            return F.batch_norm(call.input, mean, var, call.weight, call.bias, False, 0.0, call.eps)

        return replaced(self.layers, compute)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Value:
    """One loss, and how those of parts make that of the whole."""

    name: str
    value: float
    units: float
    adds_up: Literal["mean", "sum", "once"]
    seen: float | None = None
    """Divisor of the loss, if the loss is exactly one of torch's means."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """One forward."""

    values: tuple[_Value, ...] = ()
    rows: tuple[Tensor, ...] = ()
    """Representations, in float64 on the CPU."""
    dtype: torch.dtype = torch.float32
    """The coarsest that was computed in."""

    @property
    def is_finite(self) -> bool:
        """True where every loss that counts for something is a number."""
        return all(math.isfinite(one.value) for one in self.values if one.units > 0 or one.adds_up != "mean")

    @property
    def shows(self) -> bool:
        """True where every loss is over something, and not zero by chance."""
        return all(one.units > 0 and one.value != 0 for one in self.values)


def _measure(objective: Objective, model: nn.Module, batch: Batch, returned: Any, observed: ObservedMeans) -> _Measured:
    """The losses that an objective returned for these rows."""
    if isinstance(returned, TermLosses):
        counts = count_terms(returned.units, batch)
        kinds = zip(returned.losses.items(), counts, returned.units.values(), strict=True)
        values = [
            _Value(name=name, value=float(loss.detach()), units=count, adds_up="once" if units is None else "mean")
            for (name, loss), count, units in kinds
        ]
        return _Measured(values=tuple(values), dtype=next(iter(returned.losses.values())).dtype)
    loss, _ = loss_and_metrics(returned)
    number = float(loss.detach().double() if loss.device.type != "mps" else loss.detach())
    if isinstance(returned, SeenLoss):
        value = _Value(name="loss", value=number, units=returned.units, adds_up="mean")
    else:
        (units,) = count_units(objective, model, [batch])
        is_mean = len(observed.means) == 1 and number == float(observed.means[0])
        seen = float(observed.units[0]) if is_mean else None
        reduction = objective.reduction if objective.reduction_for is None else objective.reduction_for(model)
        value = _Value(name="loss", value=number, units=units, adds_up=reduction, seen=seen)
    return _Measured(values=(value,), dtype=loss.dtype)


def _measure_rows(representations: Batch) -> _Measured:
    held = [tensor.detach() for tensor in tensors(representations) if tensor.is_floating_point() and tensor.dim() > 0]
    dtype = held[0].dtype if held else torch.float32
    return _Measured(rows=tuple(tensor.to("cpu", torch.float64) for tensor in held), dtype=dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Difference:
    """How far the parts are from the whole, in one loss."""

    name: str
    error: float
    """|put together - whole| / the larger of the two."""
    whole: float
    together: float
    is_sum: bool = False
    """The losses of the parts add up as they are."""
    is_between: bool = False
    """The whole is some weighted mean of the parts."""
    units_differ: bool = False
    """The divisors of the parts are in another proportion than their units."""


def _differences(whole: _Measured, parts: Sequence[_Measured], order: Sequence[int]) -> list[_Difference]:
    """Whole against parts, loss by loss, or for representations tensor by tensor; `order` is the rows of the parts."""
    if whole.rows or any(part.rows for part in parts):
        return [_of_rows(k, one, [part.rows[k] for part in parts], order) for k, one in enumerate(whole.rows)]
    return [_of_values(one, [part.values[k] for part in parts]) for k, one in enumerate(whole.values)]


def _of_values(whole: _Value, parts: list[_Value]) -> _Difference:
    values = [part.value for part in parts]
    if whole.adds_up == "once":
        together = max(values, key=lambda value: abs(value - whole.value))
        scale = max(abs(whole.value), abs(together))
    else:
        counted = [part for part in parts if part.units > 0 or whole.adds_up != "mean"]
        total = sum(part.units for part in counted)
        terms = [(part.units / total if whole.adds_up == "mean" and total else 1.0) * part.value for part in counted]
        together, scale = sum(terms), max(abs(whole.value), sum(map(abs, terms)))
    return _Difference(
        name=whole.name,
        error=abs(together - whole.value) / scale if scale else 0.0,
        whole=whole.value,
        together=together,
        is_sum=math.isclose(sum(values), whole.value, rel_tol=1e-4),
        is_between=min(values) <= whole.value <= max(values),
        units_differ=whole.adds_up == "mean" and _are_units_other(parts),
    )


def _are_units_other(parts: list[_Value]) -> bool:
    """True where units and what was seen are not in one proportion: whatever the losses happen to be, it is not exact."""
    seen = [part.seen for part in parts if part.seen is not None]
    units = sum(part.units for part in parts)
    if len(seen) < len(parts) or not units or not sum(seen):
        return False
    return any(abs(part.units / units - one / sum(seen)) > 1e-6 for part, one in zip(parts, seen, strict=True))


def _of_rows(index: int, whole: Tensor, parts: list[Tensor], order: Sequence[int]) -> _Difference:
    together = torch.cat(parts) if all(part.shape[1:] == whole.shape[1:] for part in parts) else whole[:0]
    name = f"representation {index}"
    if len(together) != len(whole) or len(whole) != len(order) or not bool(whole.isfinite().all()):
        return _Difference(name=name, error=0.0, whole=0.0, together=0.0)  # not one entry per row: nothing to compare
    apart, scale = float((together - whole[list(order)]).norm()), float(whole.norm())
    return _Difference(name=name, error=apart / scale if scale else 0.0, whole=scale, together=float(together.norm()))

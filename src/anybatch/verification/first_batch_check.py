"""The check of an update's first batch: forwards of a few rows, and `verify` where their losses do not add up."""

import copy
import math
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
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
    take_rows,
    tensors,
)
from anybatch.dropout import masks_of, rows_running
from anybatch.errors import BatchError, ExactnessError, first_line
from anybatch.objectives import ObservedMeans, WatchedLoss
from anybatch.parallel import unwrapped
from anybatch.ragged import Tokens
from anybatch.verification.draws import Draws, drawing
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
    """Raise `ExactnessError`, with the likely cause, if the loss of a few rows is not made of the losses of its parts.

        loss(A and B) * (units(A) + units(B)) = loss(A) * units(A) + loss(B) * units(B)

    At most 8 rows, and at most those of one micro-batch, run forward twice each, without a graph. BatchNorm uses the
    statistics of all of them, and rows draw the same random numbers both times. If the two sides differ by more than
    rounding, `verify` compares the gradients of these rows, so that nothing exact is refused. A batch that is not cut is
    exact whatever its loss; the check then waits for the next batch. Model, buffers and random states are left as they
    were. Each rank checks its own rows, and all ranks raise if one does.
    """
    if accumulator.parallelism.needs_equal_passes:
        return FirstBatchCheck(finding="not judged", reason="the model is sharded, and a forward of it takes all ranks")
    found, problem = PENDING, None
    try:
        found = _check(accumulator, batch)
    except Exception as error:
        problem = error
    is_refused = accumulator.parallelism.ranks.any(problem is not None)
    if problem is not None:
        raise problem
    if is_refused:
        raise ExactnessError("the look at the first batch failed on another rank, which says why; nothing was changed.")
    return found


def _check(accumulator: Accumulator, batch: Batch) -> FirstBatchCheck:
    try:
        if isinstance(next(accumulator.model.parameters(), None), FakeTensor):
            raise NotJudgedError("the model has no numbers")
        sample = _choose_rows(accumulator, batch)
        return PENDING if sample is None else _judge(accumulator, _Forwards(accumulator, sample), batch)
    except Exception as error:  # whatever is wrong with the batch or the model, the update itself will report
        if isinstance(error, ExactnessError) and not isinstance(error, NotJudgedError):
            raise
        reason = str(error) if isinstance(error, NotJudgedError) else first_line(error)
        is_memory = is_out_of_memory(error)
    if is_memory:
        free_memory()
    return FirstBatchCheck(finding="not judged", reason=reason)


def _judge(accumulator: Accumulator, forwards: "_Forwards", batch: Batch) -> FirstBatchCheck:
    sample = forwards.sample
    with forwards.undone():
        whole = forwards.whole()
        if not whole.is_finite:
            raise NotJudgedError("the loss is not finite")
        fast = autocast_dtype(accumulator.options.autocast)
        dtypes = {whole.dtype, *(parameter.dtype for parameter in accumulator.model.parameters()), fast or whole.dtype}
        dtype = max((one for one in dtypes if one.is_floating_point), key=lambda one: torch.finfo(one).eps)
        coarse = COARSE.get(dtype, 3e-2)
        tolerance = TOLERANCE.get(dtype, 1e-3) if forwards.can_copy else coarse
        worst, parts = _compare_parts(forwards, whole)
        is_off = worst.error > tolerance or worst.units_differ
        if is_off:
            forwards.python.put_back()
            again = _differences(whole, [forwards.part(_Piece(sample.rows, sample.batch))], sample.rows)
            if max((one.error for one in again), default=0.0) > tolerance / 10 and not forwards.python.changed(
                is_left=True
            ):
                raise NotJudgedError(
                    "the same rows give another loss when they run again: something draws, or remembers, unseen"
                )
            is_off = not _is_exact_as_cut(accumulator, batch, tolerance)
        message = _verdict(accumulator, forwards, worst, coarse, parts) if is_off else None
    left = ", ".join(forwards.python.changed(is_left=True)[:4])  # closures, globals and default arguments
    if message is None:
        reason = left and f"its forwards changed {left}, outside of the model, where nothing is put back"
        return FirstBatchCheck(finding="passed", error=worst.error, reason=reason)
    raise ExactnessError(
        "the first batch shows that the accumulated gradient is not the whole batch's; nothing "
        f"{left and f'but {left} '}was changed. "
        f"{_describe(sample, worst, whole)} {message}\nMend the cause; verify(model, objective, batch) shows more. "
        "check='off' trains as it is."
    )


def _compare_parts(forwards: "_Forwards", whole: "_Measured") -> "tuple[_Difference, tuple[_Piece, ...]]":
    """Return the largest difference between parts and whole, and the parts to compare gradients of.

    A second way to take the rows apart is tried if a part of the first has no units, or fits by accident: parts of
    different sizes with equal units agree with a constant count such as 1.
    """
    compared = forwards.sample.ways[0]
    worst = _Difference(name="loss", error=0.0, whole=0.0, together=0.0)
    has_failed = False
    for pieces in forwards.sample.ways:
        try:
            parts = [forwards.part(piece) for piece in pieces]
        except Exception as error:
            if isinstance(error, NotJudgedError) or is_out_of_memory(error):
                raise
            has_failed = True  # rows that cannot run without the others depend on them
            continue
        has_failed = not all(part.is_finite for part in parts)
        if has_failed:
            continue
        order = [number for piece in pieces for number in piece.rows]
        worst = max([worst, *_differences(whole, parts, order)], key=lambda one: (one.units_differ, one.error))
        columns = zip(*(part.values for part in parts), strict=True)
        has_equal_units = any(len({one.units for one in each}) == 1 and each[0].adds_up == "mean" for each in columns)
        if has_equal_units and len({len(piece.rows) for piece in pieces}) > 1:
            compared = forwards.sample.ways[-1]
        elif all(part.shows for part in parts):
            return worst, compared
    if has_failed:
        value = whole.values[0].value if whole.values else 0.0
        return _Difference(name="loss", error=math.inf, whole=value, together=math.nan), compared
    return worst, compared


def _is_exact_as_cut(accumulator: Accumulator, batch: Batch, tolerance: float) -> bool:
    """True if the micro-batches add up though single rows do not: rows that belong together lie in one micro-batch."""
    try:
        sample = _whole_micro_batches(accumulator, batch, MOST_MICRO_BATCHES)
    except NotJudgedError:
        return False
    forwards = _Forwards(accumulator, sample)
    with forwards.undone():
        whole = forwards.whole()
        ways = [[forwards.part(piece) for piece in pieces] for pieces in sample.ways]
    found = [one for parts in ways for one in _differences(whole, parts, sample.rows)]
    is_near = all(one.error <= min(tolerance, 1e-3) and not one.units_differ for one in found)
    return is_near and whole.is_finite and all(part.is_finite and part.shows for parts in ways for part in parts)


def _verdict(
    accumulator: Accumulator, forwards: "_Forwards", worst: "_Difference", coarse: float, pieces: "Sequence[_Piece]"
) -> str | None:
    """Compare the gradients of these rows, cut into `pieces`; return the message, or None if they are exact."""
    split = accumulator.split
    by_tokens = isinstance(split, Tokens) and split.collate is None
    try:
        if not forwards.can_copy:
            return _without_proof(forwards, worst, coarse, f"more than {MOST_PARAMETERS:,} parameters")
        verdict = verify(
            forwards.model,
            forwards.objective,
            forwards.sample.batch if by_tokens else MicroBatches([piece.batch for piece in pieces]),
            micro_batch=split if by_tokens else None,
            batch_norm="exact" if accumulator.options.batch_norm == "exact" else "frozen",
            autocast=accumulator.options.autocast,
        )
    except Exception as error:  # a model that cannot be copied, for example
        return _without_proof(forwards, worst, coarse, first_line(error))
    in_float64 = [cut for cut in verdict.cuts if cut.precision == "float64"]
    if all(cut.is_exact for cut in in_float64 or verdict.cuts):  # an error in lower precision alone is rounding
        return None
    known = [cause for cause in verdict.causes if cause.kind != "unknown"]
    causes = [f"\ncause ({cause.kind}): {cause.explanation}\nfix: {cause.fix}" for cause in known]
    text = "".join(causes) or f"\ncause, likely (coupled): {_COUPLED}"  # no count of units mends it
    return f"The gradient of these rows is {verdict.error:.1e} off.{text}"


def _without_proof(forwards: "_Forwards", worst: "_Difference", coarse: float, why: str) -> str:
    """Name the likely cause by the loss alone, if its error is larger than that of another order of the rows."""
    numbers = tuple(reversed(forwards.sample.rows))
    backwards = forwards.part(_Piece(numbers, take_rows(forwards.sample.batch, list(numbers))))
    noise = max((one.error for one in _differences(forwards.whole(), [backwards], numbers)), default=0.0)
    if worst.error <= max(coarse, 20 * noise):
        raise NotJudgedError(f"the loss is {worst.error:.1e} off, and its gradient could not be compared ({why})")
    if worst.is_sum:
        text = "(sum): the loss is a sum over rows, not a mean: give reduction='sum', or return the mean."
    elif worst.is_between:
        text = "(units): the loss is a mean over something other than the units given: give units=, a function of the batch."
    else:
        text = f"(coupled): {_COUPLED}"
    return f"\ncause, likely {text}"


_COUPLED = (
    "what comes out for some rows depends on the others: a statistic of the batch, a ratio or a power of a mean, a "
    "comparison of rows.\nfix: Give Coupled(encode, loss), with all that looks at several rows in loss(representations); "
    "Terms(...) where means with different units are added up."
)


def _describe(sample: "_Sample", worst: "_Difference", whole: "_Measured") -> str:
    sizes = " and ".join(str(len(piece.rows)) for piece in sample.ways[0])
    rows = f"Of {len(sample.rows)} rows in one go"
    if whole.rows:
        return f"{rows} {worst.name} is {worst.error:.1e} away from that of {sizes} of them."
    what = worst.name if worst.name == "loss" else f"term {worst.name!r}"
    return (
        f"{rows} the {what} is {worst.whole:.6g}; put together from {sizes} of them it is {worst.together:.6g}, "
        f"{worst.error:.1e} off."
    )


class _Piece(NamedTuple):
    """Some rows of a sample, and their numbers in it."""

    rows: tuple[int, ...]
    batch: Batch


class _Sample(NamedTuple):
    """Some rows of a batch."""

    batch: Batch
    ways: tuple[tuple[_Piece, ...], ...]
    """Ways to take them apart; the first shows most."""

    @property
    def rows(self) -> tuple[int, ...]:
        return tuple(range(sum(len(piece.rows) for piece in self.ways[0])))


def _choose_rows(accumulator: Accumulator, batch: Batch) -> _Sample | None:
    """Choose rows that differ as much as the batch allows; None if it is not cut, and any loss is exact."""
    given = batch.batch if isinstance(batch, Dealt) else batch
    if (isinstance(batch, Dealt) and batch.is_stand_in) or not has_rows(given):
        raise NotJudgedError("this rank has no rows")
    split = accumulator.split
    size = _first_size(accumulator, given)
    if size is None and accumulator.parallelism.ranks.size == 1:
        return None
    if getattr(split, "batch_dim", 0) and not isinstance(given, MicroBatches):
        raise NotJudgedError("its rows are not in dim 0")
    if isinstance(given, MicroBatches) or getattr(split, "groups", None) is not None:
        return _whole_micro_batches(accumulator, given)
    count = len(given) if (collate := getattr(split, "collate", None)) else num_rows(given)
    # the rows of one micro-batch, 8 at most; if it is small, 5, but never half of the batch
    wanted = min(count, max(2, min(max(FEWEST_ROWS, min(size or MOST_ROWS, MOST_ROWS)), 2 * count // 5)))
    if collate is None:
        return _sample(given, wanted, split)
    collated = collate([given[row] for row in _spread_evenly(count, wanted)])
    return _sample(collated, num_rows(collated))


def _first_size(accumulator: Accumulator, batch: Batch) -> int | None:
    """Return the number of rows of the first micro-batch; None if it has all of them."""
    split = accumulator.split
    if isinstance(batch, MicroBatches):
        return num_rows(batch[0]) if len(batch) > 1 else None
    if split == Rows(getattr(split, "size", 1)):  # without batch_dim, groups or collate
        return split.size if num_rows(batch) > split.size else None
    choose_for = getattr(split, "choose_for", None)
    if choose_for is not None:
        choose_for(accumulator.workload, batch)  # as the update begins
    rows = copy.deepcopy(accumulator.split).cut(batch).row_numbers  # a copy, because some splits learn from each cut
    return len(rows[0]) if len(rows) > 1 else None


def _whole_micro_batches(accumulator: Accumulator, batch: Batch, most: int = 3) -> _Sample:
    """Take the first micro-batches as they will run: the smallest against all others, and each by itself."""
    given = batch.batch if isinstance(batch, Dealt) else batch
    cut = given if isinstance(given, MicroBatches) else copy.deepcopy(accumulator.split).cut(given)
    first, *others = sorted(cut, key=num_rows)[:most]
    if not others:
        raise NotJudgedError("it has one micro-batch")
    try:
        ways = [[first, join_rows(others)], [first, *others]]
        whole = join_rows(ways[0])
    except BatchError:
        raise NotJudgedError("its micro-batches cannot be joined to one") from None
    pieces = []
    for parts in ways:
        spans = pairwise([0, *accumulate(map(num_rows, parts))])
        pieces.append(tuple(_Piece(tuple(range(*span)), part) for part, span in zip(parts, spans, strict=True)))
    return _Sample(whole, tuple(pieces))


def _sample(batch: Batch, wanted: int, split: object = None) -> _Sample:
    """Take so many rows, in parts that differ most; a `Tokens` split trims the parts as in training."""
    if wanted < 2:
        raise NotJudgedError("the batch has one row")
    order = _sorted_by_kind(batch, count := num_rows(batch))
    chosen = take_rows(batch, [order[place] for place in _spread_evenly(count, wanted)])
    numbers = tuple(range(wanted))
    few = 2 if wanted > 3 else 1
    mixed = numbers[1::3] if wanted > 3 else (wanted - 1,)
    rest = tuple(number for number in numbers if number not in mixed)
    if isinstance(split, Tokens):
        split = copy.deepcopy(split)
        split._has_warned = True

    def pieces(rows: Sequence[int]) -> list[_Piece]:
        part = take_rows(chosen, list(rows))
        cut = split.cut(part) if isinstance(split, Tokens) else MicroBatches([part])
        places = zip(cut.row_numbers, cut, strict=True)
        return [_Piece(tuple(rows[place] for place in numbers), trimmed) for numbers, trimmed in places]

    ways = [(numbers[:few], numbers[few:]), (mixed, rest)]
    return _Sample(chosen, tuple(tuple(piece for rows in way for piece in pieces(rows)) for way in ways))


def _spread_evenly(count: int, wanted: int) -> list[int]:
    wanted = min(wanted, count)
    return [round(index * (count - 1) / max(wanted - 1, 1)) for index in range(wanted)]


def _sorted_by_kind(batch: Batch, count: int) -> list[int]:
    """Sort the rows by what units may depend on: ignored entries, zeros, then classes, then weights."""
    columns = [column.detach().reshape(count, -1) for column in tensors(batch) if column.dim() and len(column) == count]
    columns = [column for column in columns if column.numel() and not column.is_complex()]
    whole = [column for column in columns if not column.is_floating_point()]
    narrow = [column for column in columns if column.is_floating_point() and column.shape[1] == 1]
    keys = []
    for numbers in ([column == IGNORED for column in whole], [column == 0 for column in whole], whole, narrow):
        keys.append(sum((each.sum(1).cpu().double() for each in numbers), torch.zeros(count).double()).tolist())
    return sorted(range(count), key=list(zip(*keys, strict=True)).__getitem__)


class _Forwards:
    """Forwards of a sample's rows on the user's model, from the same buffers and random state each."""

    def __init__(self, accumulator: Accumulator, sample: _Sample) -> None:
        self.model: nn.Module = unwrapped(accumulator.model)
        self.objective: Objective | Coupled = accumulator.objective
        self.sample = sample
        self.can_copy = sum(parameter.numel() for parameter in self.model.parameters()) <= MOST_PARAMETERS
        self.python = PythonState()
        self._options = accumulator.options
        self._device = common_device(self.model.parameters())
        self._norms = {name: one for name, one in batch_norms(self.model).items() if uses_batch_statistics(one)}
        self._statistics: dict[str, list[tuple[Tensor, Tensor]]] = {}
        """Mean and variance of all rows in each call of a BatchNorm layer."""
        own_loss = [self.objective.loss] if isinstance(self.objective.loss, nn.Module) else []
        self._buffers = MovingBuffers([self.model, *own_loss])
        self._before = self._buffers.snapshot()
        self._outer = outer_random()
        self._draws: Draws | None = None
        # an observed divisor needs means with a gradient; no backward pass runs even so
        self._has_graph = isinstance(self.objective.loss, WatchedLoss)

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Restore everything after the block; torch's own dropout layers are off in it."""
        masks = masks_of(self.model)
        kept = None if masks is None else (masks.strict, masks.is_watched, masks.last)
        stock = [one for one in self.model.modules() if isinstance(one, DropoutLayer) and one.training]
        dropouts = [module for module in stock if type(module).__module__.startswith("torch.nn.")]
        try:
            for module in dropouts:
                module.training = False
            self.python = PythonState(self.model, *functions_of(self.objective), owned=[*self.model.modules()])
            if masks is not None:
                masks.strict = False  # the check itself looks for other draws
            with warnings.catch_warnings(), ExitStack() as stack:
                warnings.simplefilter("ignore")
                if "torch._dynamo" in sys.modules:  # compiling for a few rows does not pay
                    stack.enter_context(torch.compiler.set_stance("force_eager"))
                yield
        finally:
            once_more(self._put_back)
            self._outer.restore()
            for module in dropouts:
                module.training = True
            if masks is not None and kept is not None:
                masks.strict, masks.is_watched, masks.last = kept

    def whole(self) -> "_Measured":
        """Run all rows; if they draw, record the draws for the parts."""
        try:
            measured = self._run(self.sample.batch, None)
        except RuntimeError:
            if self._has_graph:
                raise
            self._has_graph = True  # a loss that takes gradients itself
            self._put_back()
            measured = self._run(self.sample.batch, None)
        if drawn := self._outer.moved():
            raise NotJudgedError(f"the loss draws from {' and '.join(drawn)}, which cannot be drawn again by row")
        assert self._before.random is not None
        if not self._before.random.is_now():
            self._put_back()
            self._draws = Draws(len(self.sample.rows))
            measured = self._run(self.sample.batch, None)
            self._refuse_row_numbers(self._draws)
        self._buffers.put_back(self._before)
        return measured

    def part(self, piece: _Piece) -> "_Measured":
        """Run some of the rows. Python state is not restored before, so that a loss that depends on it shows."""
        measured = self._run(piece.batch, piece.rows)
        self._buffers.put_back(self._before)
        if self._draws is not None and self._draws.strange:
            raise NotJudgedError(f"random draws cannot be drawn again by row: {self._draws.strange[0]}")
        return measured

    def _put_back(self) -> None:
        self.python.put_back()
        self._buffers.put_back(self._before)

    def _run(self, given: Batch, rows: Sequence[int] | None) -> "_Measured":
        batch = copy_batch(given)  # a forward may write into it
        batch = batch if self._device is None else move(batch, self._device)
        objective = self.objective
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self._has_graph))
            if self._options.autocast is not None:
                stack.enter_context(copy.copy(autocast_context(self._options.autocast, self._device)))
            if self._norms:
                stack.enter_context(replaced(self._norms, self._normalise(is_first=rows is None)))
            if self._draws is not None:
                if rows is None:
                    self._draws.whole.clear()
                stack.enter_context(drawing(self._draws, rows))
            stack.enter_context(rows_running(self.model, self.sample.rows if rows is None else rows))
            if isinstance(objective, Coupled):
                found = [one.detach() for one in tensors(objective.encode(self.model, batch)) if one.dim() > 0]
                held = [tensor for tensor in found if tensor.is_floating_point()]
                dtype = held[0].dtype if held else torch.float32
                return _Measured(rows=tuple(tensor.to("cpu", torch.float64) for tensor in held), dtype=dtype)
            observed = stack.enter_context(ObservedMeans())
            return _measure(objective, self.model, batch, objective.loss(self.model, batch), observed)

    def _normalise(self, *, is_first: bool) -> Any:
        """Return the BatchNorm of one forward: its own statistics in the first, which records them, and these later.

        So rows are judged as `batch_norm="exact"` has them, and whatever else couples them shows. Frozen layers use their
        running statistics. No running statistics move.
        """
        if is_first:
            self._statistics = {name: [] for name in self._norms}
        left = {name: iter(kept) for name, kept in self._statistics.items()}

        def compute(name: str, layer: NormLayer, call: Call) -> Tensor:
            like = next(held for held in (call.running_mean, call.weight, call.input) if held is not None)
            mean, var = call.running_mean, call.running_var
            if self._options.batch_norm != "frozen" and is_first:
                dims = [dim for dim in range(call.input.dim()) if dim != 1]
                inputs = call.input.float() if call.input.itemsize < 4 else call.input
                var, mean = (each.to(like.dtype) for each in torch.var_mean(inputs, dims, correction=0))
                self._statistics[name].append((mean, var))
            elif self._options.batch_norm != "frozen":
                mean, var = next(left[name])
            return F.batch_norm(call.input, mean, var, call.weight, call.bias, False, 0.0, call.eps)

        return compute

    def _refuse_row_numbers(self, draws: Draws) -> None:
        """Raise `NotJudgedError` if a draw may be numbers of rows: they mean other rows in a part."""
        for draw in draws.whole:
            numbers = draw.numbers
            if numbers.is_floating_point() or numbers.dtype is torch.bool:
                continue
            if "randperm" in draw.operation or "multinomial" in draw.operation:
                raise NotJudgedError(f"{draw.operation} draws an order or a choice among the rows")
            if not numbers.is_cpu and numbers.numel() and numbers.max() < len(self.sample.rows):
                raise NotJudgedError(f"{draw.operation} may draw numbers of rows")


class _Value(NamedTuple):
    """One loss, and how the losses of parts make that of the whole."""

    name: str
    value: float
    units: float
    adds_up: Literal["mean", "sum", "once"]
    divisor: float | None = None
    """Observed divisor, if the loss is exactly one of torch's means."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """Result of one forward: losses, or representations of a coupled objective."""

    values: tuple[_Value, ...] = ()
    rows: tuple[Tensor, ...] = ()
    """Representations, in float64 on the CPU."""
    dtype: torch.dtype = torch.float32

    @property
    def is_finite(self) -> bool:
        """True if every loss that counts is finite."""
        return all(math.isfinite(one.value) for one in self.values if one.units > 0 or one.adds_up != "mean")

    @property
    def shows(self) -> bool:
        """True if every loss has units and is not zero by chance."""
        return all(one.units > 0 and one.value != 0 for one in self.values)


def _measure(objective: Objective, model: nn.Module, batch: Batch, returned: Any, observed: ObservedMeans) -> _Measured:
    if isinstance(returned, TermLosses):
        kinds = zip(returned.losses.items(), count_terms(returned.units, batch), returned.units.values(), strict=True)
        values = [
            _Value(name, float(loss.detach()), count, "once" if units is None else "mean")
            for (name, loss), count, units in kinds
        ]
        return _Measured(values=tuple(values), dtype=next(iter(returned.losses.values())).dtype)
    loss, _ = loss_and_metrics(returned)
    number = float(loss.detach())
    if isinstance(returned, SeenLoss):
        return _Measured(values=(_Value("loss", number, returned.units, "mean"),), dtype=loss.dtype)
    (units,) = count_units(objective, model, [batch])
    is_mean = len(observed.means) == 1 and number == float(observed.means[0])
    reduction = objective.reduction if objective.reduction_for is None else objective.reduction_for(model)
    value = _Value("loss", number, units, reduction, float(observed.units[0]) if is_mean else None)
    return _Measured(values=(value,), dtype=loss.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Difference:
    """Difference between the parts and the whole, in one loss or one tensor of representations."""

    name: str
    error: float
    """|together - whole| / the larger of the two."""
    whole: float
    together: float
    is_sum: bool = False
    """The losses of the parts add up as they are."""
    is_between: bool = False
    """The whole is some weighted mean of the parts."""
    units_differ: bool = False
    """The observed divisors of the parts are in another proportion than their units."""


def _differences(whole: _Measured, parts: Sequence[_Measured], order: Sequence[int]) -> list[_Difference]:
    """Compare loss by loss, or representation by representation; `order` is the numbers of the parts' rows."""
    if whole.rows:
        return [_of_rows(k, one, [part.rows[k] for part in parts], list(order)) for k, one in enumerate(whole.rows)]
    return [_of_values(one, [part.values[k] for part in parts]) for k, one in enumerate(whole.values)]


def _of_values(whole: _Value, parts: list[_Value]) -> _Difference:
    values = [part.value for part in parts]
    is_mean = whole.adds_up == "mean"
    counted = [part for part in parts if part.units > 0 or not is_mean]
    total = sum(part.units for part in counted)
    terms = [(part.units / total if is_mean and total else 1.0) * part.value for part in counted]
    if whole.adds_up == "once":
        terms = [max(values, key=lambda value: abs(value - whole.value))]
    divisors = [part.divisor for part in parts if part.divisor is not None]
    is_known = is_mean and len(divisors) == len(parts) and total and sum(divisors)
    shares = (
        [(part.units / total, one / sum(divisors)) for part, one in zip(parts, divisors, strict=True)]
        if is_known
        else []
    )
    together, scale = sum(terms), max(abs(whole.value), sum(map(abs, terms)))
    return _Difference(
        name=whole.name,
        error=abs(together - whole.value) / scale if scale else 0.0,
        whole=whole.value,
        together=together,
        is_sum=math.isclose(sum(values), whole.value, rel_tol=1e-4),
        is_between=min(values) <= whole.value <= max(values),
        units_differ=any(abs(share - divided) > 1e-6 for share, divided in shares),
    )


def _of_rows(index: int, whole: Tensor, parts: list[Tensor], order: list[int]) -> _Difference:
    together = torch.cat(parts) if all(part.shape[1:] == whole.shape[1:] for part in parts) else whole[:0]
    name = f"representation {index}"
    if len(together) != len(whole) or len(whole) != len(order) or not bool(whole.isfinite().all()):
        return _Difference(name=name, error=0.0, whole=0.0, together=0.0)  # not one entry per row
    apart, scale = float((together - whole[order]).norm()), float(whole.norm())
    return _Difference(name=name, error=apart / scale if scale else 0.0, whole=scale, together=float(together.norm()))

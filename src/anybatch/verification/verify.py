"""`verify`: compare the accumulated gradient with the whole batch's, on copies of the model."""

import copy as copying
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from anybatch.core import (
    Autocast,
    Batch,
    BatchNorm,
    Coupled,
    Dealt,
    MicroBatch,
    MicroBatches,
    Objective,
    Rows,
    UpdateOptions,
    Workload,
    as_split,
    check_hooks,
    common_device,
    has_counters,
    join_rows,
    num_rows,
    options_of,
    outer_random,
    profiler_events,
    rows_first,
    take_rows,
    with_peak,
    without_op_names,
)
from anybatch.display import parse_bytes
from anybatch.errors import BatchError, SplitError, VerifyError
from anybatch.parallel import unwrapped
from anybatch.ragged import Tokens
from anybatch.verification.case import Case, Experiments, compare, cut_by_rows, make_case, uneven_cut, weights_of_rows
from anybatch.verification.causes import Explanation, explain, explain_draws
from anybatch.verification.floor import Floor, Gradient, floor_of, largest_floor, relative
from anybatch.verification.precision import autocast_dtype, roundoff, why_not_float64
from anybatch.verification.state import Copy, copy_with_noise, leaving_untouched
from anybatch.verification.verdict import Cause, CutResult, Verdict

SMALL_ERROR = 1e-5
"""Largest error in float64 that may be rounding, where terms cancel."""
TOO_FEW = (
    "this batch has no uneven cut: all its micro-batches are of one size, and then a mean of means is exact too. Give 3 rows "
    "or more to be sure of the units."
)


def verify(
    model: nn.Module,
    objective: Objective | Coupled,
    batch: Batch,
    *,
    micro_batch: MicroBatch | None = None,
    memory: int | str | None = None,
    batch_norm: BatchNorm | None = None,
    autocast: Autocast = None,
    copy: Copy | None = None,
    options: UpdateOptions | None = None,
) -> Verdict:
    """Compare the accumulated gradient of a batch with the gradient of the whole batch, and explain a difference.

    The whole batch runs in one pass of plain torch. It also runs accumulated: cut by `micro_batch`, and cut unevenly if
    `micro_batch` is None or makes micro-batches of one size, because a mean of means is exact there too. Each cut runs in
    float64 if the model allows it, and in the model's own precision. Every row gets the same random draws in all runs. The
    error of each parameter is compared with the floor, the largest error that another order of summation explains.
    Experiments then find the cause of a larger error. The verdict is "could not be judged" if random draws cannot be
    replayed row by row.

    Runs use copies of the model, one at a time. Model, gradients, buffers, random states, batch, and the modules and objects
    that the objective holds are left as they were.

    Args:
        model: The model, with or without `torch.compile` and `DistributedDataParallel` around it.
        objective: The loss, as for `Update`.
        batch: A batch of 2 rows or more, rows first.
        micro_batch: The split to verify, as for `Update`; None verifies an uneven cut.
        memory: Verify only as many rows as fit into this memory in one pass, such as "2GiB"; None verifies all rows.
        batch_norm: The statistics that BatchNorm layers use, as for `Update`.
        autocast: The dtype of autocast, as for `Update`.
        copy: A function that returns another model with the same weights, for a model that `copy.deepcopy` refuses.
        options: The options of an `Update` as one value; `batch_norm` and `autocast` are read from it, and keywords win.

    Returns:
        The verdict, with causes and fixes if the gradients differ.

    Raises:
        VerifyError: If the batch cannot be cut or joined, the model cannot be copied, the objective uses another model than
            the one it is given, or an argument is not what is expected.
        SettingsError: If `memory` is no size.

    Example:
        >>> from anybatch import supervised
        >>> verify(nn.Linear(4, 2), supervised(nn.CrossEntropyLoss()), (torch.randn(9, 4), torch.arange(9) % 2)).is_exact
        True
    """
    options = options_of(options, {"batch_norm": batch_norm, "autocast": autocast}, {})
    batch_norm, autocast = options.batch_norm, options.autocast
    if not isinstance(model, nn.Module):
        raise VerifyError(f"model={model!r:.80} is a {type(model).__name__}; expected a torch.nn.Module.")
    if not isinstance(objective, Objective | Coupled):
        raise VerifyError(
            f"objective={objective!r:.80} is a {type(objective).__name__}; expected supervised(criterion), "
            "huggingface(), Objective(loss, units) or Coupled(encode, loss)."
        )
    if isinstance(batch, Dealt):
        batch = batch.batch
    inner = unwrapped(model)
    check_hooks(inner.parameters(), inner.named_parameters, num_passes=2)  # copies would lose them
    limit = None if memory is None else parse_bytes(memory)
    whole = _whole_batch(batch, micro_batch)
    given = num_rows(whole)
    if given < 2:
        raise VerifyError(f"this batch has {given} row, which cannot be cut; give a batch of 2 rows or more.")
    with leaving_untouched(inner, objective) as held:
        case = make_case(
            inner,
            objective,
            whole,
            held=held,
            batch_norm=batch_norm,
            autocast=autocast,
            copy=copy,
            batch_dim=getattr(micro_batch, "batch_dim", None),
        )
        if limit is not None and (rows := rows_that_fit(case, limit)) < given:
            case = case.of_first(rows)
        taken = None if case.num_rows == given else range(case.num_rows)
        options = UpdateOptions(autocast=autocast, batch_norm=batch_norm)
        workload = Workload(model=inner, objective=objective, options=options)
        cuts, notes = _cuts_of(batch, case.batch, micro_batch, taken, workload)
        keeps_groups = isinstance(batch, MicroBatches) or getattr(micro_batch, "groups", None) is not None
        return _Proof(case, cuts, given, notes, keeps_groups).verdict()


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedCut:
    """A cut of the batch, by name."""

    name: str
    cut: MicroBatches
    decides: bool = True
    """False for a cut that is not used in training; an error there is only a note."""


@dataclass(slots=True)
class _Proof:
    """One batch, its cuts, the first of them that of training, and the notes about them."""

    case: Case
    cuts: list[TriedCut]
    rows_given: int
    notes: list[str]
    keeps_groups: bool
    """True if the split keeps groups of rows together."""

    def verdict(self) -> Verdict:
        outer = outer_random()
        precise, floor, results = self._compare()
        wrong = [result for result in results if result.decides and not result.is_exact]
        failing = [result for result in wrong if result.precision == precise.precision]
        found = Explanation(causes=explain_draws(precise, floor, outer.moved()))
        cut = self._cut_to_explain(failing, precise, floor)
        experiments = Experiments(case=precise, floor=floor, cut=cut, trained=self.cuts[0].cut)
        if failing:
            found = explain(experiments, found.causes)
        elif wrong and not found.causes:
            found = Explanation(causes=(_precision_cause(wrong, _dtypes(self.case)),))
        results, found = self._as_trained(results, found)
        self._add_notes(results, found)
        return Verdict(
            rows=self.case.num_rows,
            rows_given=self.rows_given,
            dtype=_dtypes(self.case),
            cuts=tuple(results),
            causes=found.causes,
            notes=tuple(self.notes),
            unjudged=found.unjudged,
            weights=weights_of_rows(experiments, self.cuts[0].cut, is_wrong=bool(found.causes)),
        )

    def _compare(self) -> tuple[Case, Floor, list[CutResult]]:
        """Compare every cut in float64, and the cut of training in the model's own precision too."""
        case = self.case
        raised = replace(case, precision="float64")
        reference = self._float64(raised)
        if reference is None:
            floor = self._floor(case, case.record())
            return case, floor, [_result(tried, case, floor) for tried in self.cuts]
        floor = self._floor(raised, reference)
        if floor.unit > torch.finfo(torch.float64).eps:
            self.notes.append(
                "parts of the model compute in fp32 whatever they are given: float64 is no closer than that."
            )
        results = [_judged(tried, raised, floor) for tried in self.cuts]
        if not all(parameter.dtype == torch.float64 for parameter in case.model.parameters()):
            own = floor_of(case.whole(), [reference], _unit_of(case))
            is_sound = results[0].is_exact  # then an error here is rounding
            results.append((_judged if is_sound else _result)(self.cuts[0], case, own))
        return raised, floor, results

    def _float64(self, raised: Case) -> Gradient | None:
        """Return the whole batch's gradient in float64; None, with a note, if the model does not run in it."""
        why = why_not_float64(raised.model)
        if why is None:
            try:
                return raised.record()
            except Exception as error:  # whatever a model raises in a precision it was not written for
                why = f"{type(error).__name__}: {str(error)[:160]}"
        self.notes.append(f"the model does not run in float64 ({why}); only its own precision was compared.")
        return None

    def _floor(self, case: Case, whole: Gradient) -> Floor:
        unit = _unit_of(case)
        order = [row for rows in reversed(self.cuts[0].cut.row_numbers) for row in rows]
        permuted = case.once(take_rows(case.batch, order), order)
        single = torch.finfo(torch.float32).eps / 2
        if case.precision == "float64" and largest_floor(unit) < relative(whole, permuted) < largest_floor(single):
            unit = single
        return floor_of(whole, [permuted], unit)

    def _cut_to_explain(self, failing: Sequence[CutResult], precise: Case, floor: Floor) -> MicroBatches:
        """Choose uneven rows if they are wrong too, because all their weights differ; else a wrong cut that runs."""
        named = {tried.name: tried.cut for tried in self.cuts}
        if not failing:
            return self.cuts[0].cut
        uneven = TriedCut(name="uneven rows", cut=uneven_cut(self.case.batch))
        if uneven.name not in named and not self.keeps_groups and precise.num_rows > 2:
            result = _result(uneven, precise, floor)
            if not result.is_exact and result.failure is None:
                return uneven.cut
        ran = [result for result in failing if result.failure is None] or failing
        return named[ran[-1].name]

    def _as_trained(self, results: list[CutResult], found: Explanation) -> tuple[list[CutResult], Explanation]:
        """Turn the cause into a note if the cut of training keeps the rows of each group together."""
        trained = [result for result in results if result.name == self.cuts[0].name]
        is_only_groups = bool(found.causes) and all(cause.kind == "groups" for cause in found.causes)
        if not is_only_groups or not all(result.is_exact for result in trained) or len(self.cuts) < 2:
            return results, found
        self.notes += [f"{cause.explanation} {cause.fix}" for cause in found.causes]
        return [replace(result, decides=result in trained) for result in results], Explanation()

    def _add_notes(self, results: Sequence[CutResult], found: Explanation) -> None:
        if not found.causes and not found.unjudged:
            for result in results:
                if not result.decides and result.name == "by tokens" and not result.is_exact:
                    how = f"failed ({result.failure})" if result.failure else f"is {result.error:.1e} off"
                    self.notes.append(
                        f"with padding cut off (Tokens) the gradient {how}: the model or the loss looks at padding. That is a "
                        "fact about the model, and its rows are exact with their padding; keep Rows(n)."
                    )
        left = self.case.held.changed(is_left=True)
        if left and not any(cause.kind == "state" for cause in found.causes):
            self.notes.append(
                f"running the loss changes {', '.join(left[:4])}, outside of the model: closures, globals and default "
                "arguments are not put back."
            )


def _unit_of(case: Case) -> float:
    """Return the unit roundoff of the case's precision."""
    if case.precision == "float64":
        return torch.finfo(torch.float64).eps / 2
    return roundoff((*case.model.parameters(), *case.model.buffers()), autocast_dtype(case.autocast))


def _result(tried: TriedCut, case: Case, floor: Floor) -> CutResult:
    return compare(case, tried.cut, floor, name=tried.name, decides=tried.decides)


def _judged(tried: TriedCut, case: Case, floor: Floor) -> CutResult:
    """Compare; hold a small error against the effect of rounding the parameters before calling it an error."""
    result = _result(tried, case, floor)
    is_small = case.precision == "own" or result.error <= SMALL_ERROR
    if result.is_exact or result.failure is not None or not is_small:
        return result
    if relative(floor.whole, case.whole()) > largest_floor(floor.unit):
        return result  # the whole batch itself is not reproducible
    perturbed = replace(case, model=copy_with_noise(case.model, case.copy, floor.unit)).whole()
    return _result(tried, case, floor.widened(perturbed))


def _precision_cause(wrong: Sequence[CutResult], dtype: str) -> Cause:
    worst = max(wrong, key=lambda result: result.error)
    if worst.failure is not None:
        return Cause(
            kind="error",
            explanation=f"In float64 every cut is exact, but in {dtype} {worst.name!r} failed: {worst.failure}",
            fix="Mend the error; it does not come when the whole batch runs in one go.",
        )
    return Cause(
        kind="precision",
        explanation=f"In float64 every cut is exact; in {dtype} {worst.name!r} is {worst.error:.1e} off, more than the "
        "order of summation explains: numbers underflow, or lose digits before they are added up.",
        fix="Keep parameters in fp32 and use autocast; for fp16 use a GradScaler.",
    )


def _dtypes(case: Case) -> str:
    dtypes = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in case.model.parameters()})
    cast = autocast_dtype(case.autocast)
    return "/".join(dtypes) + (f" with {str(cast).removeprefix('torch.')} autocast" if cast else "")


def _whole_batch(batch: Batch, micro_batch: MicroBatch | None) -> Batch:
    """Join micro-batches, or collate raw samples, to one batch with rows first."""
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


def _cuts_of(
    given: Batch, whole: Batch, micro_batch: MicroBatch | None, rows: Sequence[int] | None, workload: Workload
) -> tuple[list[TriedCut], list[str]]:
    """Return the cut of training, an uneven one if that is even, one by tokens that decides nothing, and notes.

    `rows` are the row numbers in the given batch if `whole` does not hold all of it.
    """
    trained = _trained(given, whole, micro_batch, rows, workload)
    is_cut = trained is not None and (len(trained.cut) > 1 or trained.cut.cut is not None)
    uneven = _uneven(whole, micro_batch, None if trained is None else trained.cut)
    cuts = [tried for tried in (trained if is_cut else None, uneven) if tried is not None]
    has_uneven = any(len({len(numbers) for numbers in tried.cut.row_numbers}) > 1 for tried in cuts)
    if not cuts:
        cuts.append(TriedCut(name="rows by 1", cut=Rows(1).cut(whole)))
    by_tokens = None if isinstance(micro_batch, Tokens) else _by_tokens(whole)
    if by_tokens is not None:
        cuts.append(TriedCut(name="by tokens", cut=by_tokens, decides=False))
    return cuts, [] if has_uneven else [TOO_FEW]


def _trained(
    given: Batch, whole: Batch, micro_batch: MicroBatch | None, rows: Sequence[int] | None, workload: Workload
) -> TriedCut | None:
    """Cut as an update would; None without a split."""
    if isinstance(given, MicroBatches):
        return None if rows is not None else TriedCut(name="as given", cut=given)
    if micro_batch is None:
        return None
    split = copying.deepcopy(as_split(micro_batch))  # a copy, because some splits learn from each cut
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
    """Cut into micro-batches of different sizes if those of training have one size; None if there is no such cut.

    Of three or more micro-batches all but the first are joined, so that groups of rows stay together.
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


def _by_tokens(whole: Batch) -> MicroBatches | None:
    """Cut by the attention mask, a third of the padded tokens at a time; None without a mask or padding."""
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


def rows_that_fit(case: Case, limit: int) -> int:
    """Return the largest number of rows, out of 2, 4, 8, ... and all, that run in one pass within `limit` bytes.

    The largest run is measured, in float64 if the model allows it. A size is not tried if the line through the last two
    peaks is above the limit.
    """
    count = case.num_rows
    fits, sizes = 0, [*itertools.takewhile(lambda size: size < count, (2**power for power in range(1, 64))), count]
    seen: list[tuple[int, int]] = []
    for size in sizes:
        if len(seen) >= 2:
            (small, low), (large, high) = seen[-2:]
            if high + (high - low) * (size - large) // (large - small) > limit:
                break
        seen.append((size, _peak(case.of_first(size))))
        if seen[-1][1] > limit:
            break
        fits = size
    if fits == 0:
        raise VerifyError(
            f"memory={limit:,} bytes: 2 rows in one go take {max(seen)[1]:,} bytes, with the weights and gradients of "
            "the copy. Give more, or rows that are shorter."
        )
    return fits


def _peak(case: Case) -> int:
    """Measure the peak of one pass in bytes: the copy, its gradients and the graph."""
    if case.precision == "own" and why_not_float64(case.model) is None:
        try:
            return _peak(replace(case, precision="float64"))
        except (RuntimeError, TypeError, ValueError):  # a model that does not run in float64
            pass
    device = common_device(case.model.parameters())
    if device is not None and has_counters(device):
        before = torch.accelerator.memory_allocated(device)
        return with_peak(case.record, device)[1] - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, without_op_names():
        case.record()
    events = profiler_events(profiler)
    allocated = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return int(max(itertools.accumulate((nbytes for _, nbytes in allocated), initial=0)))

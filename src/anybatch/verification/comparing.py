"""`verify`: the accumulated gradient against the whole batch's, on copies."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

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
    Running,
    Workload,
    check_hooks,
    common_device,
    has_counters,
    num_rows,
    outer_random,
    profiler_events,
    take_rows,
    with_peak,
    without_op_names,
)
from anybatch.display import parse_bytes
from anybatch.errors import VerifyError
from anybatch.parallel import unwrapped
from anybatch.verification.case import Case, make_case
from anybatch.verification.causes import Experiments, Explanation, explain, explain_draws, weights_of_rows
from anybatch.verification.compared_precision import autocast_dtype, roundoff, why_not_float64
from anybatch.verification.copies import Copy, leaving_untouched, rounded_otherwise
from anybatch.verification.cuts import TriedCut, cuts_of, uneven_cut, whole_batch
from anybatch.verification.floor import Floor, Gradient, floor_of, largest_floor, relative
from anybatch.verification.verdict import Cause, CutResult, Verdict

SMALL_ERROR = 1e-5
"""In float64: above it an error is no rounding, whatever cancels."""


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
) -> Verdict:
    """Whether accumulating this batch gives the gradient of the whole batch in one go; and if not, why not and what to do.

    The batch runs in one go by plain torch and accumulated: cut by `micro_batch`, and where that makes micro-batches of one
    size, or is not given, cut unevenly. In float64 where the model allows, and in the model's own precision. Every row has the
    same random draws in all of them. Per parameter the error is held against the floor that the order of summation explains.
    Where it is above, experiments find the cause. What cannot be drawn again row by row could not be judged.

    All runs are on copies, one at a time: model, gradients, buffers, random states, batch and what the objective holds are left
    as they are. A model that `copy.deepcopy` refuses needs `copy`, a function of the model that returns another with the same
    weights. `memory`, such as "2GiB", verifies as many rows as fit into it in one go; else all rows must fit.

    >>> from anybatch import supervised
    >>> verify(nn.Linear(4, 2), supervised(nn.CrossEntropyLoss()), (torch.randn(9, 4), torch.arange(9) % 2)).is_exact
    True
    """
    _check(model, objective)
    if isinstance(batch, Dealt):
        batch = batch.batch
    inner = unwrapped(model)
    check_hooks(inner.parameters(), inner.named_parameters, num_passes=2)  # copies would lose them
    limit = None if memory is None else parse_bytes(memory)
    whole = whole_batch(batch, micro_batch)
    given = num_rows(whole)
    if given < 2:
        raise VerifyError(f"this batch has {given} row, which cannot be cut; give a batch of 2 rows or more.")
    with leaving_untouched(inner, objective) as held:
        options: dict[str, Any] = {
            "held": held,
            "batch_norm": batch_norm,
            "autocast": autocast,
            "copy": copy,
            "batch_dim": getattr(micro_batch, "batch_dim", None),
        }
        case = make_case(inner, objective, whole, **options)
        rows = None if limit is None else rows_that_fit(case, limit)
        if rows is not None and rows < given:
            whole = take_rows(whole, slice(0, rows))
            case = make_case(inner, objective, whole, **options)
        taken = None if num_rows(whole) == given else range(num_rows(whole))
        running = Running(autocast=autocast, batch_norm=batch_norm)
        workload = Workload(model=inner, objective=objective, running=running)
        cuts, notes = cuts_of(batch, whole, micro_batch, taken, workload=workload)
        keeps_groups = isinstance(batch, MicroBatches) or getattr(micro_batch, "groups", None) is not None
        return Proof(case, cuts, given, notes, keeps_groups).verdict()


@dataclass(slots=True)
class Proof:
    """One batch, the cuts that it is tried in, and what is said beside the numbers."""

    case: Case
    cuts: list[TriedCut]
    rows_given: int
    notes: list[str]
    keeps_groups: bool = False
    """Whether rows belong together, so that none may be taken alone."""

    def verdict(self) -> Verdict:
        """Compare, and explain what differs."""
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
            found = Explanation(causes=(_precision_cause(wrong, _name_of(self.case)),))
        return self._told(*self._as_trained(results, found), experiments)

    def _compare(self) -> tuple[Case, Floor, list[CutResult]]:
        """Every cut in float64, and that which trains in the model's own precision too."""
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
            own = floor_of(case.whole(), [reference], unit_of(case))
            is_sound = results[0].is_exact  # then what is seen here is rounding
            results.append((_judged if is_sound else _result)(self.cuts[0], case, own))
        return raised, floor, results

    def _float64(self, raised: Case) -> Gradient | None:
        """The gradient in one go in float64; None, with a note, where the model does not run so."""
        why = why_not_float64(raised.model)
        if why is None:
            try:
                return raised.record()
            except Exception as error:  # whatever a model raises in a precision it was not written for
                why = f"{type(error).__name__}: {str(error)[:160]}"
        self.notes.append(f"the model does not run in float64 ({why}); only its own precision was compared.")
        return None

    def _floor(self, case: Case, whole: Gradient) -> Floor:
        unit = unit_of(case)
        order = [row for rows in reversed(self.cuts[0].cut.row_numbers) for row in rows]
        permuted = case.once(take_rows(case.batch, order), order)
        if case.precision == "float64":
            apart = relative(whole, permuted)
            single = torch.finfo(torch.float32).eps / 2
            if largest_floor(unit) < apart < largest_floor(single):
                unit = single
        return floor_of(whole, [permuted], unit)

    def _cut_to_explain(self, failing: Sequence[CutResult], precise: Case, floor: Floor) -> MicroBatches:
        """Uneven rows where they are wrong too, because no two of their weights are alike; else a wrong cut that runs."""
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
        """Rows that belong together are torn by no cut that trains: this is then a note."""
        trained = [result for result in results if result.name == self.cuts[0].name]
        is_only_torn = bool(found.causes) and all(cause.kind == "groups" for cause in found.causes)
        if not is_only_torn or not all(result.is_exact for result in trained) or len(self.cuts) < 2:
            return results, found
        self.notes += [f"{cause.explanation} {cause.fix}" for cause in found.causes]
        return [replace(result, decides=result in trained) for result in results], Explanation()

    def _told(self, results: Sequence[CutResult], found: Explanation, experiments: Experiments) -> Verdict:
        other = [result for result in results if not result.decides and result.name == "by tokens"]
        if not found.causes and not found.unjudged:
            self.notes += [_padding_note(result) for result in other if not result.is_exact]
        left = self.case.held.python.changed(is_left=True)
        if left and not any(cause.kind == "state" for cause in found.causes):
            self.notes.append(
                f"running the loss changes {', '.join(left[:4])}, outside of the model: closures, globals and default "
                "arguments are not put back."
            )
        weights = weights_of_rows(experiments, self.cuts[0].cut, is_wrong=bool(found.causes))
        return Verdict(
            rows=self.case.num_rows,
            rows_given=self.rows_given,
            dtype=_name_of(self.case),
            cuts=tuple(results),
            causes=found.causes,
            notes=tuple(self.notes),
            unjudged=found.unjudged,
            weights=weights,
        )


def unit_of(case: Case) -> float:
    """The unit roundoff of the precision that the case runs in."""
    if case.precision == "float64":
        return torch.finfo(torch.float64).eps / 2
    return roundoff(chain(case.model.parameters(), case.model.buffers()), autocast_dtype(case.autocast))


def _result(tried: TriedCut, case: Case, floor: Floor) -> CutResult:
    cut = tried.cut
    told = CutResult(
        name=tried.name,
        precision=case.precision,
        micro_batches=len(cut),
        rows=tuple(len(numbers) for numbers in cut.row_numbers),
        error=float("inf"),
        parameters=(),
        decides=tried.decides,
    )
    try:
        accumulated = case.accumulated(cut)
    except Exception as error:  # a cut that cannot run is a finding, not the end
        return replace(told, failure=f"{type(error).__name__}: {error}")
    return replace(told, error=relative(floor.whole, accumulated), parameters=floor.errors(accumulated, len(cut)))


def _judged(tried: TriedCut, case: Case, floor: Floor) -> CutResult:
    """The result; an error so small that it may be rounding is held against what rounding the parameters alone does."""
    result = _result(tried, case, floor)
    is_small = case.precision == "own" or result.error <= SMALL_ERROR
    if result.is_exact or result.failure is not None or not is_small:
        return result
    if relative(floor.whole, case.whole()) > largest_floor(floor.unit):
        return result  # it is not the same twice
    perturbed = replace(case, model=rounded_otherwise(case.model, case.copy, floor.unit)).whole()
    return _result(tried, case, floor.widened(perturbed))


def _padding_note(result: CutResult) -> str:
    how = f"failed ({result.failure})" if result.failure else f"is {result.error:.1e} off"
    return (
        f"with padding cut off (Tokens) the gradient {how}: the model or the loss looks at padding. That is a fact about the "
        "model, and its rows are exact with their padding; keep Rows(n)."
    )


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


def _name_of(case: Case) -> str:
    dtypes = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in case.model.parameters()})
    cast = autocast_dtype(case.autocast)
    return "/".join(dtypes) + (f" with {str(cast).removeprefix('torch.')} autocast" if cast else "")


def _check(model: nn.Module, objective: Objective | Coupled) -> None:
    if not isinstance(model, nn.Module):
        raise VerifyError(f"model={model!r:.80} is a {type(model).__name__}; expected a torch.nn.Module.")
    if not isinstance(objective, Objective | Coupled):
        raise VerifyError(
            f"objective={objective!r:.80} is a {type(objective).__name__}; expected supervised(criterion), "
            "huggingface(), Objective(loss, units) or Coupled(encode, loss)."
        )


def rows_that_fit(case: Case, limit: int) -> int:
    """The largest number of rows, of 2, 4, 8, ... and all, whose backward pass in one go takes at most `limit` bytes.

    Measured is the run that takes most, in float64 where the model has it. What does not fit is not run: the next doubling
    is taken to cost in proportion to the rows.
    """
    count = num_rows(case.batch)
    fits, sizes = 0, [*itertools.takewhile(lambda size: size < count, (2**power for power in range(1, 64))), count]
    seen: list[tuple[int, int]] = []
    for size in sizes:
        expected = _expected(seen, size)
        if expected > limit:
            break
        peak = _peak(case, size)
        seen.append((size, peak))
        if peak > limit:
            break
        fits = size
    if fits == 0:
        raise VerifyError(
            f"memory={limit:,} bytes: 2 rows in one go take {max(seen)[1]:,} bytes, with the weights and gradients of "
            "the copy. Give more, or rows that are shorter."
        )
    return fits


def _expected(seen: list[tuple[int, int]], size: int) -> int:
    """On the line through the last two peaks; what is not known yet is expected to fit."""
    if len(seen) < 2:
        return 0
    (small, low), (large, high) = seen[-2:]
    return high + (high - low) * (size - large) // (large - small)


def _peak(case: Case, size: int) -> int:
    """Bytes at the peak of a run of the first `size` rows: the copy, its gradients and the graph."""
    names = ("held", "batch_norm", "autocast", "copy", "batch_dim")
    options = {name: getattr(case, name) for name in names}
    part = make_case(case.model, case.objective, take_rows(case.batch, slice(0, size)), **options)
    wide = make_case(case.model, case.objective, part.batch, **options, precision="float64")
    if why_not_float64(case.model) is None:
        try:
            return _measured(case, wide.record)
        except (RuntimeError, TypeError, ValueError):  # a model that does not run in float64
            pass
    return _measured(case, part.record)


def _measured(case: Case, run: Callable[[], object]) -> int:
    device = common_device(case.model.parameters())
    if device is not None and has_counters(device):
        before = torch.accelerator.memory_allocated(device)
        return with_peak(run, device)[1] - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, without_op_names():
        run()
    events = profiler_events(profiler)
    allocated = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return int(max(itertools.accumulate((nbytes for _, nbytes in allocated), initial=0)))

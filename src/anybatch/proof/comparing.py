"""`verify`: the accumulated gradient against the whole batch's, on copies."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import nn

from anybatch.batches import Batch, Dealt, MicroBatch, MicroBatches, Workload, num_rows, take_rows
from anybatch.errors import VerifyError
from anybatch.objectives import Coupled, Objective
from anybatch.options import Autocast, BatchNorm
from anybatch.parallel import unwrapped
from anybatch.passes import Running
from anybatch.proof.cases import (
    Case,
    Copy,
    Gradient,
    copy_model,
    leaving_untouched,
    make_case,
    roundoff,
    why_not_float64,
)
from anybatch.proof.causes import Experiments, explain
from anybatch.proof.cuts import cuts_of, uneven_cut, whole_batch
from anybatch.proof.floor import Floor, floor_of, largest_floor, relative
from anybatch.proof.rows_that_fit import rows_that_fit
from anybatch.proof.verdict import Cause, CutResult, Verdict
from anybatch.sizes import parse_bytes


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

    The batch runs in one go by plain torch and accumulated in several cuts (by `micro_batch`, rows by 1 and by 3, in half, by
    tokens where there is an attention mask), in the model's own precision and in float64 where the model allows.
    Every row has the same random draws in all of them. Per parameter the error is held against the floor that the order of
    summation explains. Where it is above, experiments find the cause.

    All runs are on copies: model, gradients, buffers, random states and batch are left as they are. A model that
    `copy.deepcopy` refuses needs `copy`, a function of the model that returns another with the same weights. `memory`, such as
    "2GiB", verifies as many rows as fit into it in one go; else all rows must fit.

    >>> from anybatch import supervised
    >>> verify(nn.Linear(4, 2), supervised(nn.CrossEntropyLoss()), (torch.randn(9, 4), torch.arange(9) % 2)).is_exact
    True
    """
    _check(model, objective)
    if isinstance(batch, Dealt):
        batch = batch.batch
    inner = unwrapped(model)
    limit = None if memory is None else parse_bytes(memory)
    whole = whole_batch(batch, micro_batch)
    given = num_rows(whole)
    if given < 2:
        raise VerifyError(f"this batch has {given} row, which cannot be cut; give a batch of 2 rows or more.")
    with leaving_untouched(inner, objective):
        case = make_case(copy_model(inner, copy), objective, whole, batch_norm=batch_norm, autocast=autocast, copy=copy)
        rows = None if limit is None else rows_that_fit(case, limit)
        if rows is not None and rows < given:
            whole = take_rows(whole, slice(0, rows))
            case = make_case(case.model, objective, whole, batch_norm=batch_norm, autocast=autocast, copy=copy)
        taken = None if num_rows(whole) == given else range(num_rows(whole))
        running = Running(autocast=autocast, batch_norm=batch_norm)
        workload = Workload(model=case.model, objective=objective, running=running)
        cuts = cuts_of(batch, whole, micro_batch, taken, workload=workload)
        return _Proof(case, cuts, given).verdict()


@dataclass(slots=True)
class _Proof:
    case: Case
    cuts: dict[str, MicroBatches]
    rows_given: int

    def verdict(self) -> Verdict:
        whole = self.case.record()
        raised, notes = self._float64(self.case)
        floors = [self._floor(self.case, whole, [] if raised is None else [raised[1]])]
        if raised is not None:
            floors.append(self._floor(*raised, []))
            if floors[-1][1].unit > torch.finfo(torch.float64).eps:
                notes.append(
                    "parts of the model compute in fp32 whatever they are given: float64 is no closer than that."
                )
        results = [
            self._result(name, cut, case, floor) for case, floor in reversed(floors) for name, cut in self.cuts.items()
        ]
        causes: tuple[Cause, ...] = ()
        if not all(result.is_exact for result in results):
            causes = self._causes(floors, results)
        return Verdict(
            rows=self.case.num_rows,
            rows_given=self.rows_given,
            dtype=_name_of(self.case),
            cuts=tuple(results),
            causes=causes,
            notes=tuple(notes),
        )

    def _float64(self, case: Case) -> tuple[tuple[Case, Gradient] | None, list[str]]:
        """The same case in float64, and its gradient in one go; or a note why not."""
        if all(parameter.dtype == torch.float64 for parameter in case.model.parameters()):
            return None, []
        why = why_not_float64(case.model)
        raised = replace(case, precision="float64")
        if why is None:
            try:
                return (raised, raised.whole()), []
            except Exception as error:  # whatever a model raises in a precision it was not written for
                why = f"{type(error).__name__}: {str(error)[:160]}"
        return None, [f"the model does not run in float64 ({why}); only its own precision was compared."]

    def _floor(self, case: Case, whole: Gradient, references: list[Gradient]) -> tuple[Case, Floor]:
        unit = unit_of(case)
        permuted = list(_permuted(case))
        if case.precision == "float64":
            apart = min((relative(whole, other) for other in permuted), default=0.0)
            single = torch.finfo(torch.float32).eps / 2
            if largest_floor(unit) < apart < largest_floor(single):
                unit = single
        return case, floor_of(whole, [*permuted, *references], unit)

    @staticmethod
    def _result(name: str, cut: MicroBatches, case: Case, floor: Floor) -> CutResult:
        rows = tuple(len(numbers) for numbers in cut.row_numbers)
        common = {"name": name, "precision": case.precision, "micro_batches": len(cut), "rows": rows}
        try:
            accumulated = case.accumulated(cut)
        except Exception as error:  # a cut that cannot run is a finding, not the end
            failure = f"{type(error).__name__}: {error}"
            return CutResult(**common, error=float("inf"), parameters=(), failure=failure)  # type: ignore[arg-type]
        errors = floor.errors(accumulated, len(cut))
        return CutResult(**common, error=relative(floor.whole, accumulated), parameters=errors)  # type: ignore[arg-type]

    def _causes(self, floors: Sequence[tuple[Case, Floor]], results: Sequence[CutResult]) -> tuple[Cause, ...]:
        case, floor = floors[-1]
        failing = [result for result in results if result.precision == case.precision and not result.is_exact]
        if not failing:
            return (_precision_cause(results, _name_of(self.case)),)
        experiments = Experiments(case=case, floor=floor, cut=uneven_cut(case.batch))
        if experiments.try_out(case).is_exact:
            worst = max(failing, key=lambda result: (result.failure is None, result.error))
            experiments = replace(experiments, cut=self.cuts[worst.name])
        return explain(experiments)


def unit_of(case: Case) -> float:
    """The unit roundoff of the precision that the case runs in."""
    if case.precision == "float64":
        return torch.finfo(torch.float64).eps / 2
    return roundoff(chain(case.model.parameters(), case.model.buffers()), _autocast_dtype(case))


def _permuted(case: Case) -> Iterator[Gradient]:
    """The whole batch with its rows in other orders: backwards, and every other row first."""
    count = case.num_rows
    for order in ([*reversed(range(count))], [*range(0, count, 2), *range(1, count, 2)]):
        yield case.once(take_rows(case.batch, order), order)


def _precision_cause(results: Sequence[CutResult], dtype: str) -> Cause:
    worst = max((result for result in results if not result.is_exact), key=lambda result: result.error)
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


def _autocast_dtype(case: Case) -> torch.dtype | None:
    if isinstance(case.autocast, torch.dtype) or case.autocast is None:
        return case.autocast
    return getattr(case.autocast, "fast_dtype", None)


def _name_of(case: Case) -> str:
    dtypes = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in case.model.parameters()})
    cast = _autocast_dtype(case)
    return "/".join(dtypes) + (f" with {str(cast).removeprefix('torch.')} autocast" if cast else "")


def _check(model: nn.Module, objective: Objective | Coupled) -> None:
    if not isinstance(model, nn.Module):
        raise VerifyError(f"model={model!r:.80} is a {type(model).__name__}; expected a torch.nn.Module.")
    if not isinstance(objective, Objective | Coupled):
        raise VerifyError(
            f"objective={objective!r:.80} is a {type(objective).__name__}; expected supervised(criterion), "
            "huggingface(), Objective(loss, units) or Coupled(encode, loss)."
        )

"""All that a run folder holds, as records. Only `run.json` must be there; all else is optional and read as far as it goes."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from anybatch.records.comparison import Comparison
from anybatch.records.proof_schema import ProofRecord
from anybatch.records.run_folder import RunFolder
from anybatch.records.schema import (
    EpochDone,
    MemorySeen,
    Metric,
    PlanRecord,
    Run,
    UpdateDone,
    WindowSeen,
)
from anybatch.records.tolerant_reading import Record, read
from anybatch.records.traced_update import Trace

METRICS: dict[str, type[Metric]] = {kind.event: kind for kind in (UpdateDone, EpochDone, WindowSeen, MemorySeen)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """What a finished run left behind: the one thing that every chart, table and sentence of a report is made from."""

    run: Run
    updates: tuple[UpdateDone, ...] = ()
    epochs: tuple[EpochDone, ...] = ()
    windows: tuple[WindowSeen, ...] = ()
    """With their stages in the order of time, the first one at 0."""
    memory: tuple[MemorySeen, ...] = ()
    comparison: Comparison | None = None
    trace: Trace | None = None
    proof: ProofRecord | None = None
    plan: PlanRecord | None = None
    num_unreadable: int = 0
    """Lines of `metrics.jsonl` that are no JSON object, because a kill in the middle of a write cut them off."""


def read_results(path: Path) -> Results:
    """All results of the run folder `path`.

    An update that was logged twice, before a kill and after the resume, counts once: the later line holds.
    """
    folder = RunFolder(path)
    run = folder.read_run()
    events = [event for _, event in folder.lines()]
    kinds = [(METRICS.get(str(event.get("event"))), event) for event in events if event is not None]
    metrics = [metric for kind, event in kinds if kind and (metric := read(kind, event)) is not None]
    windows = [_from_zero(metric) for metric in metrics if isinstance(metric, WindowSeen) and metric.stages]
    return Results(
        run=run,
        updates=_last_of_each([metric for metric in metrics if isinstance(metric, UpdateDone)], "update"),
        epochs=_last_of_each([metric for metric in metrics if isinstance(metric, EpochDone)], "epoch"),
        windows=_last_of_each(windows, "update"),
        memory=_last_of_each([_with_peak(metric) for metric in metrics if isinstance(metric, MemorySeen)], "update"),
        comparison=read(Comparison, folder.read_object(Comparison.file) or None),
        trace=read(Trace, folder.read_object(Trace.file) or None),
        proof=read(ProofRecord, folder.read_object(ProofRecord.file) or None),
        plan=read(PlanRecord, folder.read_object(PlanRecord.file) or None),
        num_unreadable=sum(event is None for event in events),
    )


def _last_of_each(metrics: Iterable[Record], number: str) -> tuple[Record, ...]:
    """In the order of their number. The last one holds where several have the same number."""
    found = {getattr(metric, number): metric for metric in metrics}
    return tuple(found[key] for key in sorted(found))


def _from_zero(window: WindowSeen) -> WindowSeen:
    stages = sorted(window.stages, key=lambda stage: stage.start)
    return replace(window, stages=tuple(replace(stage, start=stage.start - stages[0].start) for stage in stages))


def _with_peak(seen: MemorySeen) -> MemorySeen:
    """With the highest point as its peak, where the record names none."""
    highest = max((point.bytes for point in seen.points), default=None)
    return replace(seen, peak_bytes=highest) if seen.peak_bytes is None else seen

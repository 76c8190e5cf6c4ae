"""A run folder in, `Results` out. Only `run.json` must be there; all else is optional and read as far as it goes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anybatch.errors import ReportError
from anybatch.report.fields import loads, nested, objects, real, reals, scalar, scalars, shapes, text, whole
from anybatch.report.results import (
    Arm,
    ArmEpoch,
    ArmRun,
    Cause,
    Comparison,
    CutResult,
    EpochPoint,
    Layer,
    MemoryCurve,
    MemoryPoint,
    ParameterError,
    PeakPlan,
    Proof,
    Results,
    Run,
    Span,
    Step,
    Timeline,
    UpdatePoint,
    Walk,
)

Fields = Mapping[str, Any]


def read_results(run_folder: Path) -> Results:
    """All results of a run folder.

    An update that was logged twice, before a kill and after the resume, counts once: the later line holds.
    """
    run = _run(_object(run_folder, "run.json", is_required=True))
    events, num_unreadable = _events(run_folder)
    comparison = _object(run_folder, "compare.json")
    walk = _object(run_folder, "trace.json")
    proof = _object(run_folder, "verify.json")
    planned = _object(run_folder, "plan.json")
    updates = {update.update: update for event in events if (update := _update(event))}
    epochs = {epoch.epoch: epoch for event in events if (epoch := _epoch(event))}
    timelines = {timeline.update: timeline for event in events if (timeline := _timeline(event))}
    memory = {curve.update: curve for event in events if (curve := _memory(event))}
    return Results(
        run=run,
        updates=tuple(updates[key] for key in sorted(updates)),
        epochs=tuple(epochs[key] for key in sorted(epochs)),
        timelines=tuple(timelines[key] for key in sorted(timelines)),
        memory=tuple(memory[key] for key in sorted(memory)),
        comparison=_comparison(comparison) if comparison else None,
        walk=_walk(walk) if walk else None,
        proof=_proof(proof) if proof else None,
        peak_plan=_peak_plan(planned) if planned else None,
        num_unreadable=num_unreadable,
    )


def _object(run_folder: Path, name: str, *, is_required: bool = False) -> Fields:
    path = run_folder / name
    if not path.is_file():
        if not is_required:
            return {}
        what = "is a file" if run_folder.is_file() else f"has no {name}" if run_folder.is_dir() else "does not exist"
        raise ReportError(
            f"{str(run_folder)!r} {what}; a run folder holds {name}, and metrics.jsonl, compare.json, trace.json or "
            "verify.json. "
            f"Give the folder that `anybatch train`, `compare`, `trace` or `verify` named when it ended."
        )
    try:
        loaded = loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ReportError(
            f"{str(path)!r} is not JSON ({error}); anybatch writes it whole or not at all. Restore the file, or run again."
        ) from None
    if not isinstance(loaded, Mapping):
        raise ReportError(
            f"{str(path)!r} holds a {type(loaded).__name__}; a JSON object was expected. Restore the file, or run again."
        )
    return loaded


def _events(run_folder: Path) -> tuple[list[Fields], int]:
    path = run_folder / "metrics.jsonl"
    if not path.is_file():
        return [], 0
    events: list[Fields] = []
    num_unreadable = 0
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if not line.strip():
                continue
            try:
                event = loads(line)
            except ValueError:
                event = None
            if isinstance(event, Mapping):
                events.append(event)
            else:
                num_unreadable += 1
    return events, num_unreadable


def _peak_plan(fields: Fields) -> PeakPlan:
    sizes = [(real(entry.get("size")), real(entry.get("peak"))) for entry in objects(fields.get("sizes"))]
    sentences = fields.get("sentences")
    return PeakPlan(
        unit=text(fields.get("unit"), "rows"),
        micro_batch=whole(fields.get("micro_batch")),
        limit=real(fields.get("limit")),
        sizes=tuple((size, peak) for size, peak in sizes if size is not None and peak is not None),
        parts=reals(fields.get("breakdown")),
        sentences=tuple(map(text, sentences)) if isinstance(sentences, list) else (),
    )


def _run(fields: Fields) -> Run:
    if "kind" not in fields or "task" not in fields:
        raise ReportError(
            f"run.json has the keys {sorted(fields)}; 'kind' and 'task' were expected. It is not a run of anybatch: give the "
            f"folder that `anybatch train`, `compare`, `trace` or `verify` named when it ended."
        )
    return Run(
        kind=text(fields["kind"]),
        task=text(fields["task"]),
        status=text(fields.get("status")),
        anybatch=text(fields.get("anybatch")),
        created=text(fields.get("created")),
        command=text(fields.get("command")),
        seed=scalar(fields.get("seed")),
        git=None if fields.get("git") is None else text(fields["git"]),
        versions=scalars(fields.get("versions")),
        settings=scalars(fields.get("settings")),
        plan=scalars(fields.get("plan")),
        summary=scalars(fields.get("summary")),
    )


def _update(event: Fields) -> UpdatePoint | None:
    update = whole(event.get("update"))
    if event.get("event") != "update" or update is None:
        return None
    return UpdatePoint(
        update=update,
        epoch=whole(event.get("epoch")),
        loss=real(event.get("loss")),
        grad_norm=real(event.get("grad_norm")),
        lr=real(event.get("lr")),
        rows=whole(event.get("rows")),
        micro_batches=whole(event.get("micro_batches")),
        applied=event.get("applied") is not False,
        seconds=real(event.get("seconds")),
        metrics=reals(event.get("metrics")),
    )


def _epoch(event: Fields) -> EpochPoint | None:
    epoch = whole(event.get("epoch"))
    if event.get("event") != "epoch" or epoch is None:
        return None
    return EpochPoint(
        epoch=epoch,
        update=whole(event.get("update")),
        train_loss=real(event.get("train_loss")),
        valid_loss=real(event.get("valid_loss")),
        metrics=reals(event.get("metrics")),
        train_metrics=reals(event.get("train_metrics")),
        seconds=real(event.get("seconds")),
    )


def _timeline(event: Fields) -> Timeline | None:
    update = whole(event.get("update"))
    if event.get("event") != "window" or update is None:
        return None
    spans = [
        Span(stage=text(span.get("stage")), micro_batch=whole(span.get("micro_batch")), start=start, seconds=seconds)
        for span in objects(event.get("stages"))
        if (start := real(span.get("start"))) is not None and (seconds := real(span.get("seconds"))) is not None
    ]
    if not spans:
        return None
    first = min(span.start for span in spans)
    return Timeline(
        update=update,
        spans=tuple(
            Span(stage=span.stage, micro_batch=span.micro_batch, start=span.start - first, seconds=span.seconds)
            for span in sorted(spans, key=lambda span: span.start)
        ),
    )


def _memory(event: Fields) -> MemoryCurve | None:
    update = whole(event.get("update"))
    if event.get("event") != "memory" or update is None:
        return None
    points = tuple(
        MemoryPoint(seconds=seconds, num_bytes=num_bytes, stage=text(point.get("stage")))
        for point in objects(event.get("points"))
        if (seconds := real(point.get("seconds"))) is not None and (num_bytes := real(point.get("bytes"))) is not None
    )
    highest = max((point.num_bytes for point in points), default=None)
    peak = real(event.get("peak_bytes"))
    return MemoryCurve(update=update, points=points, peak_bytes=highest if peak is None else peak)


def _comparison(fields: Fields) -> Comparison:
    findings = fields.get("findings")
    return Comparison(
        metric=text(fields.get("metric"), "metric"),
        arms=tuple(_arm(arm) for arm in objects(fields.get("arms"))),
        findings=tuple(text(finding) for finding in findings) if isinstance(findings, list) else (),
    )


def _arm(fields: Fields) -> Arm:
    return Arm(
        name=text(fields.get("name")),
        description=text(fields.get("description")),
        batch=whole(fields.get("batch")),
        micro_batch=whole(fields.get("micro_batch")),
        lr=real(fields.get("lr")),
        runs=tuple(_arm_run(run) for run in objects(fields.get("runs"))),
    )


def _arm_run(fields: Fields) -> ArmRun:
    return ArmRun(
        seed=scalar(fields.get("seed")),
        updates=whole(fields.get("updates")),
        samples_seen=whole(fields.get("samples_seen")),
        seconds=real(fields.get("seconds")),
        peak_bytes=real(fields.get("peak_bytes")),
        epochs=tuple(
            ArmEpoch(
                epoch=epoch,
                train_loss=real(point.get("train_loss")),
                valid_loss=real(point.get("valid_loss")),
                metric=real(point.get("metric")),
            )
            for point in objects(fields.get("epochs"))
            if (epoch := whole(point.get("epoch"))) is not None
        ),
    )


def _walk(fields: Fields) -> Walk:
    return Walk(
        steps=tuple(
            Step(
                stage=text(step.get("stage")),
                micro_batch=whole(step.get("micro_batch")),
                title=text(step.get("title")),
                facts=scalars(step.get("facts")),
                values=nested(step.get("values")),
            )
            for step in objects(fields.get("stages"))
        ),
        layers=tuple(
            Layer(
                name=text(layer.get("name")),
                kind=text(layer.get("kind")),
                shapes_in=shapes(layer.get("in")),
                shapes_out=shapes(layer.get("out")),
                values=nested(layer.get("values")),
            )
            for layer in objects(fields.get("layers"))
        ),
    )


def _proof(fields: Fields) -> Proof:
    return Proof(
        is_exact=fields.get("is_exact") is True,
        rows=whole(fields.get("rows")),
        rows_given=whole(fields.get("rows_given")),
        dtype=text(fields.get("dtype"), "own precision"),
        cuts=tuple(_cut(cut) for cut in objects(fields.get("cuts"))),
        causes=tuple(
            Cause(kind=text(cause.get("kind")), explanation=text(cause.get("explanation")), fix=text(cause.get("fix")))
            for cause in objects(fields.get("causes"))
        ),
        notes=tuple(text(note) for note in fields.get("notes") or ()),
    )


def _cut(fields: Fields) -> CutResult:
    return CutResult(
        name=text(fields.get("name")),
        precision=text(fields.get("precision")),
        micro_batches=whole(fields.get("micro_batches")),
        error=real(fields.get("error")),
        is_exact=fields.get("is_exact") is True,
        failure=text(fields.get("failure")),
        parameters=tuple(
            ParameterError(
                name=text(parameter.get("name")), error=real(parameter.get("error")), floor=real(parameter.get("floor"))
            )
            for parameter in objects(fields.get("parameters"))
        ),
    )

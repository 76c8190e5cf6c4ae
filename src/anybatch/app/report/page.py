"""The page of a run: sections of charts, tables and text, made from `Results` and written as one HTML file."""

import math
import os
import struct
import zlib
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from anybatch.app.records.run_folder import Results, read_results
from anybatch.app.records.schema import (
    Comparison,
    MicroBatchSeen,
    ProofRecord,
    Run,
    Scalars,
    Trace,
    TracedImage,
    TracedLayer,
    TracedStage,
)
from anybatch.app.records.tolerant_reading import read
from anybatch.app.report import proof_charts, training_charts, writing
from anybatch.app.report.chart import Chart, Table
from anybatch.app.report.comparison_charts import charts_of_comparison, final_table
from anybatch.app.report.headline import headline, summary
from anybatch.display import plural

PAGE = "report.html"
ROWS = "What every row counted for"
ONCE = ("clip", "step", "zero")
"""Stages that always run once per batch."""
OUTCOMES = {
    "load": ("shapes", "rows"),
    "forward": ("output",),
    "loss": ("loss", "share"),
    "backward": ("its norm",),
    "accumulate": ("gradient norm so far", "gradient norm"),
    "clip": ("norm before", "norm after"),
    "step": ("change of all weights (norm)",),
    "zero": (".grad", "gradients left"),
}
"""Facts of each stage that its cell shows; stages are in the order of an update."""
BEFORE = {"backward": "norm ", "accumulate": "norm of the sum ", "step": "weights moved by ", "zero": ".grad "}
"""Words before the fact of a cell."""


class Lane(NamedTuple):
    """Stages of one micro-batch, or of the whole batch, as (stage, outcome)."""

    title: str
    cells: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One part of the page, with a heading and an entry in the contents."""

    name: str
    title: str
    charts: tuple[Chart, ...] = ()
    tables: tuple[tuple[str, Table], ...] = ()  # (title, table)
    notes: tuple[str, ...] = ()  # sentences at the top
    terms: tuple[tuple[str, str], ...] = ()  # (name, meaning)
    code: str = ""  # a command to copy
    stages: tuple[tuple[str, tuple[TracedStage, ...]], ...] = ()  # (micro-batch, stages of a trace)
    layers: tuple[TracedLayer, ...] = ()
    lanes: tuple[Lane, ...] = ()  # the stages as a picture
    picture: Markup | None = None  # a cell per row
    prediction: str = ""  # the class predicted for the sample
    probabilities: tuple[float, ...] = ()  # one per class
    image: str | None = None  # `data:` address of the sample


def write_page(run_folder: Path) -> Path:
    """Write `report.html` into a run folder, from the results in it, and return its path.

    The page loads nothing from elsewhere. It replaces an earlier page atomically; nothing else in the folder changes.

    Args:
        run_folder: Folder that `anybatch train`, `compare`, `trace`, `plan` or `verify` has written.

    Returns:
        The path of the page.

    Raises:
        RunError: If the folder holds no run.
    """
    return write_whole(run_folder / PAGE, render(read_results(run_folder)))


def render(results: Results) -> str:
    """Return the page as HTML."""
    environment = page_environment(is_trimmed=True)
    environment.filters |= {
        "written_sample": writing.written_sample,
        "without_breaks": writing.without_breaks,
        "words": writing.words,
        "written_shapes": writing.written_shapes,
        "stage_colour": training_charts.stage_colour,
    }
    environment.globals["written"] = writing.written_value
    num = results.num_unreadable
    left_out = f"{plural(num, 'line')} of metrics.jsonl could not be read and {'is' if num == 1 else 'are'} left out."
    return environment.get_template("page.html").render(
        run=results.run,
        task=writing.written_task(results.run.task),
        created=writing.written_time(results.run.created),
        summary=summary(results),
        headline=headline(results),
        sections=sections(results),
        unreadable=left_out if num else "",
        style=asset("page.css"),
        script=asset("page.js"),
    )


def sections(results: Results) -> tuple[Section, ...]:
    """Return the non-empty sections of the page, in reading order."""
    parts: list[Section] = []
    if results.proof is not None:
        parts += _proof_sections(results.proof)
    if results.comparison is not None:
        parts += _comparison_sections(results.comparison)
    if results.plan is not None:
        charts = tuple(training_charts.charts_of_plan(results.plan))
        parts.append(Section(name="memory", title="What fits", notes=results.plan.sentences[1:], charts=charts))
    if results.trace is not None:
        parts += _trace_sections(results.trace)
    parts += _training_sections(results)
    return tuple(
        part for part in parts if part.charts or part.tables or part.notes or part.stages or part.layers or part.picture
    )


def _proof_sections(proof: ProofRecord) -> Iterator[Section]:
    causes = tuple(
        f"{cause.explanation} Fix: {cause.fix}" + (f" See: anybatch learn {cause.lesson}." if cause.lesson else "")
        for cause in proof.causes
    )
    title = "Why it could not be judged" if proof.unjudged else "Why it is not exact"
    yield Section(name="causes", title=title, notes=(proof.unjudged, *causes) if proof.unjudged else causes)
    yield Section(name="weights", title="The weight of every row", picture=proof_charts.weights_picture(proof))
    tables = (("Every cut", proof_charts.cuts_table(proof)),)
    charts = tuple(proof_charts.charts_of_proof(proof))
    yield Section(name="proof", title="Accumulated against the whole batch", charts=charts, tables=tables)


def _comparison_sections(comparison: Comparison) -> Iterator[Section]:
    yield Section(name="findings", title="What was found", notes=comparison.findings)
    yield Section(
        name="arms",
        title="The ways to train",
        terms=tuple((arm.name, arm.description) for arm in comparison.arms if arm.description),
        charts=tuple(charts_of_comparison(comparison)),
        tables=(("What each ended with", final_table(comparison)),) if comparison.arms else (),
    )


def _trace_sections(trace: Trace) -> Iterator[Section]:
    in_order = sorted(trace.stages, key=lambda entry: math.inf if entry.micro_batch is None else entry.micro_batch)
    stages = tuple(
        ("The whole batch" if index is None else f"Micro-batch {index}", tuple(group))
        for index, group in groupby(in_order, key=lambda entry: entry.micro_batch)
    )
    charts = tuple(proof_charts.charts_of_trace(trace))
    yield Section(
        name="stages", title="One update, stage by stage", charts=charts, stages=stages, lanes=lanes_of(trace.stages)
    )
    yield Section(name="rows", title=ROWS, picture=proof_charts.shares_picture(_loss_shares(trace.stages), title=ROWS))
    predicted = next((layer for layer in trace.layers if layer.kind == "prediction"), None)
    yield Section(
        name="layers",
        title="One sample, layer by layer",
        layers=tuple(layer for layer in trace.layers if layer.kind != "prediction"),
        prediction="" if predicted is None else predicted.name,
        probabilities=tuple(each for each in predicted.values if isinstance(each, float)) if predicted else (),
        image=image_address(trace.images[0]) if trace.images else None,
    )


def _training_sections(results: Results) -> Iterator[Section]:
    charts = tuple(training_charts.epoch_charts(results.epochs))
    yield Section(name="epochs", title="Training, epoch by epoch", charts=charts)
    charts = tuple(training_charts.update_charts(results))
    yield Section(name="updates", title="Training, update by update", charts=charts)
    if results.windows and results.trace is None:
        picture = proof_charts.shares_picture(results.windows[-1].micro_batches, title=ROWS)
        yield Section(name="rows", title=ROWS, picture=picture)
    timeline = [training_charts.timeline_chart(window) for window in results.windows[-1:]]
    charts = (*timeline, *training_charts.memory_charts(results.memory))
    yield Section(name="inside", title="Inside an update", charts=charts)
    tables = tuple(_settings(results.run))
    yield Section(name="settings", title="How it was run", code=results.run.command, tables=tables)


def _settings(run: Run) -> Iterator[tuple[str, Table]]:
    about: Scalars = {
        "started": writing.written_time(run.created),
        "status": run.status,
        "because": run.reason,
        "seed": run.seed,
        "git revision": run.git,
        "anybatch": run.anybatch,
    }
    shown = {name: value for name, value in about.items() if value not in (None, "")}
    tables: tuple[tuple[str, str, Scalars], ...] = (
        ("Result", "number", run.summary),
        ("Plan", "number", run.plan),
        ("Settings", "setting", run.settings),
        ("Run", "fact", {**shown, **run.versions}),
    )
    for title, column, values in tables:
        named = [(name, writing.words(name), value) for name, value in values.items()]
        rows = tuple((word, writing.written_value(name, value)) for name, word, value in named if value is not None)
        unset = [word for _, word, value in named if value is None and title == "Settings"]
        note = f"Not set: {', '.join(unset)}." if unset else ""
        if rows or note:
            yield title, Table((column, "value"), rows, note)


def page_environment(*, is_trimmed: bool = False) -> Environment:
    """Return the templates; they escape all text of runs, scripts and logs."""
    return Environment(
        loader=PackageLoader("anybatch.app.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=is_trimmed,
        lstrip_blocks=is_trimmed,
    )


def asset(*names: str) -> Markup:
    """Return scripts or styles of the page, joined."""
    folder = files("anybatch.app.report") / "templates"
    return Markup("".join((folder / name).read_text(encoding="utf-8") for name in names))


def write_whole(page: Path, html: str) -> Path:
    """Write a page atomically: a reader finds the earlier one or this one."""
    draft = page.with_name(f".{page.name}.{os.getpid()}")
    draft.write_text(html, encoding="utf-8", errors="backslashreplace")  # file names may hold bytes that are not UTF-8
    return draft.replace(page)


def lanes_of(stages: Sequence[TracedStage]) -> tuple[Lane, ...]:
    """Return a lane for each micro-batch in order, then that of the batch."""
    found = {entry.micro_batch for entry in stages if entry.micro_batch is not None and entry.stage not in ONCE}
    lanes = [
        Lane(f"micro-batch {number}", _cells([entry for entry in stages if entry.micro_batch == number]))
        for number in sorted(found)
    ]
    once = [entry for entry in stages if entry.stage in ONCE or (entry.micro_batch is None and entry.stage != "load")]
    if once:
        lanes.append(Lane("the whole batch, once", _cells(once)))
    return tuple(lanes)


def _loss_shares(stages: Sequence[TracedStage]) -> tuple[MicroBatchSeen, ...]:
    """Return rows, units and share of each micro-batch that has a loss of its own."""
    rows = {entry.micro_batch: entry.facts.get("rows") for entry in stages if entry.stage == "load"}
    parts = (
        read(MicroBatchSeen, {**entry.facts, "rows": rows.get(entry.micro_batch)})
        for entry in stages
        if entry.stage == "loss" and entry.micro_batch is not None
    )
    return tuple(part for part in parts if part is not None)


def _cells(entries: Sequence[TracedStage]) -> tuple[tuple[str, str], ...]:
    """Return one cell per stage; of the two entries of the step, the weights before are left out."""
    outcomes = {
        entry.stage: _outcome(entry) for entry in entries if entry.stage != "step" or "before" not in entry.title
    }
    place = {stage: number for number, stage in enumerate(OUTCOMES)}
    return tuple(sorted(outcomes.items(), key=lambda cell: place.get(cell[0], len(place))))


def _outcome(entry: TracedStage) -> str:
    """Write the main facts of a stage in a few words."""
    found = [
        writing.written_value(name, entry.facts[name]) for name in OUTCOMES.get(entry.stage, ()) if name in entry.facts
    ]
    if entry.stage == "loss" and len(found) == 2:
        return f"{found[0]}, share {found[1]}"
    if entry.stage == "clip" and len(found) == 2:
        return f"norm {found[0]} → {found[1]}"
    return f"{BEFORE.get(entry.stage, '')}{found[0]}" if found and found[0] else entry.title


def image_address(image: TracedImage) -> str | None:
    """Return a PNG as a `data:` address; None if the pixels do not match the size, as in a damaged file."""
    line = image.width * image.channels
    values = [value for value in image.pixels if isinstance(value, int | float)]
    if image.channels not in (1, 3) or not line or len(values) != line * image.height:
        return None
    pixels = bytes(min(max(int(value), 0), 255) for value in values)
    # every line begins with its filter type: 0 is none
    lines = b"".join(b"\0" + pixels[start : start + line] for start in range(0, len(pixels), line))
    head = struct.pack(">IIBBBBB", image.width, image.height, 8, 0 if image.channels == 1 else 2, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n"
    for kind, content in ((b"IHDR", head), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b"")):
        png += struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
    return f"data:image/png;base64,{b64encode(png).decode()}"

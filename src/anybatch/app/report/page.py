"""The page: sections of charts, tables and text, put together from `Results` and written as one HTML file."""

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
"""Stages that a batch goes through as a whole, always; where its rows wait for each other, the passes too."""
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
"""The facts of each stage that its cell shows; stages are in the order of an update."""
BEFORE = {"backward": "norm ", "accumulate": "norm of the sum ", "step": "weights moved by ", "zero": ".grad "}
"""Words before the fact."""


class Lane(NamedTuple):
    """One micro-batch, or the whole batch, from left to right."""

    title: str
    cells: tuple[tuple[str, str], ...]
    """(stage, what came out of it)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One part of the page, with its own heading and its own place in the list of contents."""

    name: str
    title: str
    charts: tuple[Chart, ...] = ()
    tables: tuple[tuple[str, Table], ...] = ()
    """Tables that are read as they stand, each with a title."""
    notes: tuple[str, ...] = ()
    """Sentences that come first."""
    terms: tuple[tuple[str, str], ...] = ()
    """Names and what they mean."""
    code: str = ""
    """A command, to be copied."""
    stages: tuple[tuple[str, tuple[TracedStage, ...]], ...] = ()
    """The stages of a trace, gathered by micro-batch."""
    layers: tuple[TracedLayer, ...] = ()
    lanes: tuple[Lane, ...] = ()
    """The same stages as a picture."""
    picture: Markup | None = None
    """A cell per row."""
    prediction: str = ""
    """What the sample was told to be."""
    probabilities: tuple[float, ...] = ()
    """One for each class."""
    image: str | None = None
    """The address of the sample's picture, where it is an image."""


def write_page(run_folder: Path) -> Path:
    """Write `report.html` into a run folder, from the results in it, and return its path.

    One file that needs no other and no network. An earlier page is replaced in one step; nothing else is touched.
    """
    return write_whole(run_folder / PAGE, render(read_results(run_folder)))


def render(results: Results) -> str:
    """The page as text."""
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
    """The parts of the page that the results have something for, in reading order."""
    parts: list[Section] = []
    if results.proof is not None:
        parts += _proof_sections(results.proof)
    if results.comparison is not None:
        parts += _comparison_sections(results.comparison)
    if results.plan is not None:
        notes = results.plan.sentences[1:]
        parts.append(
            Section(
                name="memory",
                title="What fits",
                notes=notes,
                charts=tuple(training_charts.charts_of_plan(results.plan)),
            )
        )
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
    yield Section(name="rows", title=ROWS, picture=proof_charts.shares_picture(made_of(trace.stages), title=ROWS))
    told = next((layer for layer in trace.layers if layer.kind == "prediction"), None)
    yield Section(
        name="layers",
        title="One sample, layer by layer",
        layers=tuple(layer for layer in trace.layers if layer.kind != "prediction"),
        prediction="" if told is None else told.name,
        probabilities=() if told is None else tuple(each for each in told.values if isinstance(each, float)),
        image=image_address(trace.images[0]) if trace.images else None,
    )


def _training_sections(results: Results) -> Iterator[Section]:
    yield Section(
        name="epochs", title="Training, epoch by epoch", charts=tuple(training_charts.epoch_charts(results.epochs))
    )
    yield Section(
        name="updates", title="Training, update by update", charts=tuple(training_charts.update_charts(results))
    )
    if results.windows and results.trace is None:
        picture = proof_charts.shares_picture(results.windows[-1].micro_batches, title=ROWS)
        yield Section(name="rows", title=ROWS, picture=picture)
    timeline = (training_charts.timeline_chart(results.windows[-1]),) if results.windows else ()
    yield Section(
        name="inside", title="Inside an update", charts=(*timeline, *training_charts.memory_charts(results.memory))
    )
    yield Section(
        name="settings", title="How it was run", code=results.run.command, tables=tuple(_settings(results.run))
    )


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
        rows = tuple(
            (writing.words(name), writing.written_value(name, value))
            for name, value in values.items()
            if value is not None
        )
        unset = [writing.words(name) for name, value in values.items() if value is None] if title == "Settings" else []
        note = f"Not set: {', '.join(unset)}." if unset else ""
        if rows or note:
            yield title, Table((column, "value"), rows, note)


def page_environment(*, is_trimmed: bool = False) -> Environment:
    """The templates; whatever a run, a script or a log brought is escaped."""
    return Environment(
        loader=PackageLoader("anybatch.app.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=is_trimmed,
        lstrip_blocks=is_trimmed,
    )


def asset(*names: str) -> Markup:
    """Scripts or styles of the page, one after the other."""
    folder = files("anybatch.app.report") / "templates"
    return Markup("".join((folder / name).read_text(encoding="utf-8") for name in names))


def write_whole(page: Path, html: str) -> Path:
    """Write a page in one step: a reader finds the earlier one or this."""
    draft = page.with_name(f".{page.name}.{os.getpid()}")
    draft.write_text(html, encoding="utf-8", errors="backslashreplace")  # names may be of bytes that are no text
    return draft.replace(page)


def lanes_of(stages: Sequence[TracedStage]) -> tuple[Lane, ...]:
    """A lane for each micro-batch in order, then the batch's own."""
    numbers = sorted(
        {entry.micro_batch for entry in stages if entry.micro_batch is not None and entry.stage not in ONCE}
    )
    lanes = [
        Lane(f"micro-batch {number}", _cells([entry for entry in stages if entry.micro_batch == number]))
        for number in numbers
    ]
    once = [entry for entry in stages if entry.stage in ONCE or (entry.micro_batch is None and entry.stage != "load")]
    if once:
        lanes.append(Lane("the whole batch, once", _cells(once)))
    return tuple(lanes)


def made_of(stages: Sequence[TracedStage]) -> tuple[MicroBatchSeen, ...]:
    """Rows, units and share of each micro-batch that had a loss of its own."""
    rows = {entry.micro_batch: entry.facts.get("rows") for entry in stages if entry.stage == "load"}
    parts = (
        read(MicroBatchSeen, {**entry.facts, "rows": rows.get(entry.micro_batch)})
        for entry in stages
        if entry.stage == "loss" and entry.micro_batch is not None
    )
    return tuple(part for part in parts if part is not None)


def _cells(entries: Sequence[TracedStage]) -> tuple[tuple[str, str], ...]:
    """One cell a stage; of two entries of a stage (weights before, weights after) the last speaks."""
    told = {entry.stage: _outcome(entry) for entry in entries if entry.stage != "step" or "before" not in entry.title}
    place = {stage: number for number, stage in enumerate(OUTCOMES)}
    return tuple(sorted(told.items(), key=lambda cell: place.get(cell[0], len(place))))


def _outcome(entry: TracedStage) -> str:
    """The facts that matter of a stage, in few writing.words; clipping shows what it made of what."""
    found = [
        writing.written_value(name, entry.facts[name]) for name in OUTCOMES.get(entry.stage, ()) if name in entry.facts
    ]
    if entry.stage == "loss" and len(found) == 2:
        return f"{found[0]}, share {found[1]}"
    if entry.stage == "clip" and len(found) == 2:
        return f"norm {found[0]} → {found[1]}"
    return f"{BEFORE.get(entry.stage, '')}{found[0]}" if found and found[0] else entry.title


def image_address(image: TracedImage) -> str | None:
    """A PNG as a `data:` address; None where the numbers of pixels and sides do not agree, as in a damaged file."""
    line = image.width * image.channels
    values = [value for value in image.pixels if isinstance(value, int | float)]
    if image.channels not in (1, 3) or not line or len(values) != line * image.height:
        return None
    pixels = bytes(min(max(int(value), 0), 255) for value in values)
    # every line begins with the number of its filter: 0 is none
    lines = b"".join(b"\0" + pixels[start : start + line] for start in range(0, len(pixels), line))
    colour = 0 if image.channels == 1 else 2
    head = struct.pack(">IIBBBBB", image.width, image.height, 8, colour, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", head) + _chunk(b"IDAT", zlib.compress(lines, 9)) + _chunk(b"IEND", b"")
    return f"data:image/png;base64,{b64encode(png).decode()}"


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

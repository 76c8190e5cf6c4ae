"""The page: sections of charts, tables and text, put together from `Results` and written as one HTML file."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from itertools import groupby
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from anybatch.report.charts import (
    Chart,
    Table,
    comparison_charts,
    course_charts,
    cuts_table,
    epoch_charts,
    final_table,
    memory_charts,
    plan_charts,
    proof_charts,
    stage_colour,
    timeline_chart,
    update_charts,
    walk_charts,
)
from anybatch.report.headline import headline, summary
from anybatch.report.reading import read_results
from anybatch.report.results import Layer, Results, Scalar, Step
from anybatch.report.writing import entry, moment, plural, sample, tied, words

PAGE = "report.html"


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
    steps: tuple[tuple[str, tuple[Step, ...]], ...] = ()
    """The stages of a trace, gathered by micro-batch."""
    layers: tuple[Layer, ...] = ()


def write_page(run_folder: Path) -> Path:
    """Write `report.html` into a run folder, from the results in it, and return its path.

    One file that needs no other and no network. An earlier page is replaced in one step; nothing else is touched.
    """
    page = run_folder / PAGE
    html = render(read_results(run_folder))
    draft = page.with_name(f".{PAGE}.{os.getpid()}")
    draft.write_text(html, encoding="utf-8")
    draft.replace(page)
    return page


def render(results: Results) -> str:
    """The page as text."""
    environment = Environment(
        loader=PackageLoader("anybatch.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "sample": sample,
        "tied": tied,
        "words": words,
        "stage_colour": stage_colour,
    }
    environment.globals["entry"] = entry
    return environment.get_template("page.html").render(
        run=results.run,
        created=moment(results.run.created),
        summary=summary(results),
        headline=headline(results),
        sections=sections(results),
        unreadable=_unreadable(results.num_unreadable),
        style=_asset("page.css"),
        script=_asset("page.js"),
        plotly=_plotly(),
    )


def sections(results: Results) -> tuple[Section, ...]:
    """The parts of the page that the results have something for, in reading order."""
    parts: list[Section] = []
    if results.proof is not None:
        causes = tuple(f"{cause.explanation} Fix: {cause.fix}" for cause in results.proof.causes)
        parts.append(Section(name="causes", title="Why it is not exact", notes=causes))
        parts.append(
            Section(
                name="proof",
                title="Accumulated against the whole batch",
                charts=tuple(proof_charts(results.proof)),
                tables=(("Every cut", cuts_table(results.proof)),),
            )
        )
    if results.comparison is not None:
        comparison = results.comparison
        parts.append(Section(name="findings", title="What was found", notes=comparison.findings))
        parts.append(
            Section(
                name="arms",
                title="The ways to train",
                terms=tuple((arm.name, arm.description) for arm in comparison.arms if arm.description),
                charts=tuple(comparison_charts(comparison)),
                tables=(("What each ended with", final_table(comparison)),) if comparison.arms else (),
            )
        )
    if results.peak_plan is not None:
        planned = results.peak_plan
        parts.append(
            Section(name="memory", title="What fits", notes=planned.sentences[1:], charts=tuple(plan_charts(planned)))
        )
    if results.walk is not None:
        steps = tuple(
            ("The whole batch" if index is None else f"Micro-batch {index}", tuple(group))
            for index, group in groupby(results.walk.steps, key=lambda step: step.micro_batch)
        )
        parts.append(
            Section(
                name="stages", title="One update, stage by stage", charts=tuple(walk_charts(results.walk)), steps=steps
            )
        )
        parts.append(Section(name="layers", title="One sample, layer by layer", layers=results.walk.layers))
    parts.append(Section(name="epochs", title="Training, epoch by epoch", charts=tuple(epoch_charts(results.epochs))))
    parts.append(Section(name="updates", title="Training, update by update", charts=_update_charts(results)))
    windows = (timeline_chart(results.timelines[-1]),) if results.timelines else ()
    parts.append(
        Section(name="inside", title="Inside an update", charts=windows + tuple(memory_charts(results.memory)))
    )
    parts.append(
        Section(name="settings", title="How it was run", code=results.run.command, tables=tuple(_settings(results)))
    )
    return tuple(part for part in parts if part.charts or part.tables or part.notes or part.steps or part.layers)


def _update_charts(results: Results) -> tuple[Chart, ...]:
    return (*update_charts(results), *course_charts(results)) if results.updates else ()


def _settings(results: Results) -> Iterable[tuple[str, Table]]:
    run = results.run
    about: dict[str, Scalar] = {
        "started": moment(run.created),
        "status": run.status,
        "seed": run.seed,
        "git revision": run.git,
        "anybatch": run.anybatch,
    }
    shown = {name: value for name, value in about.items() if value not in (None, "")}
    tables: tuple[tuple[str, str, Mapping[str, Scalar]], ...] = (
        ("Result", "number", run.summary),
        ("Plan", "number", run.plan),
        ("Settings", "setting", run.settings),
        ("Run", "fact", {**shown, **run.versions}),
    )
    for title, column, values in tables:
        rows = tuple((words(name), entry(name, value)) for name, value in values.items() if value is not None)
        unset = [words(name) for name, value in values.items() if value is None] if title == "Settings" else []
        note = f"Not set: {', '.join(unset)}." if unset else ""
        if rows or note:
            yield title, Table(columns=(column, "value"), rows=rows, note=note)


def _unreadable(count: int) -> str:
    if not count:
        return ""
    return f"{plural(count, 'line')} of metrics.jsonl could not be read and {'is' if count == 1 else 'are'} left out."


def _asset(name: str) -> Markup:
    return Markup((files("anybatch.report") / "templates" / name).read_text(encoding="utf-8"))


def _plotly() -> Markup:
    from plotly.offline import get_plotlyjs  # slow to import

    return Markup(get_plotlyjs())

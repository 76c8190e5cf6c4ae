"""`anybatch trace`: one update stage by stage, one sample layer by layer."""

import dataclasses
from pathlib import Path

from anybatch.app.cli.folders import begin, first_record, write_page
from anybatch.app.cli.screen import plan_lines, say
from anybatch.app.records.schema import Shapes, Trace
from anybatch.app.records.tolerant_reading import plain
from anybatch.app.training.settings import Settings
from anybatch.display import table


def trace_command(task: str, settings: Settings, *, out: Path | None, is_quiet: bool) -> int:
    """Trace, print and leave a run folder."""
    folder, build = begin(task, out, "tracing one update of", is_quiet=is_quiet)
    from anybatch.app.lessons.update_trace import trace
    from anybatch.app.training.experiment import assemble

    # the trace is of the first update, at the full learning rate
    experiment = assemble(build, dataclasses.replace(settings, warmup=0, decay="none"))
    found = trace(experiment)
    for line in [*plan_lines(experiment.plan), "", *trace_lines(found), ""]:
        say(line, is_quiet=is_quiet)
    run = first_record("trace", task, settings)
    folder.write(dataclasses.replace(run, plan=plain(experiment.plan), status="finished"))
    folder.write(found)
    say(f"page: {write_page(folder)}", is_quiet=is_quiet)
    return 0


def trace_lines(found: Trace) -> list[str]:
    """The trace as text: a row for each micro-batch, then what happens once, then the sample's walk. The page has it all."""
    from anybatch.app.report.page import lanes_of

    *parts, once = lanes_of(found.stages)
    stages = [stage for stage, _ in parts[0].cells] if parts else []
    lanes = [[lane.title, *(dict(lane.cells).get(stage, "") for stage in stages)] for lane in parts]
    rows = [
        [
            layer.name,
            layer.kind,
            _shape(layer.shapes_in),
            _shape(layer.shapes_out),
            " ".join(f"{value:.4g}" for value in layer.values[:4]),
        ]
        for layer in found.layers
    ]
    return [
        "one update, stage by stage",
        *table(["", *stages], lanes),
        f"{once.title}: {', then '.join(f'{stage} ({outcome})' for stage, outcome in once.cells)}",
        "",
        "one sample, layer by layer",
        *table(["layer", "kind", "in", "out", "first values"], rows),
    ]


def _shape(shapes: Shapes) -> str:
    return " ".join("x".join(map(str, shape)) or "1" for shape in shapes)

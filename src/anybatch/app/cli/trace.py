"""`anybatch trace`: one update stage by stage, one sample layer by layer."""

import dataclasses
from pathlib import Path

from anybatch.app.cli.folders import begin, finish, first_record
from anybatch.app.cli.screen import plan_lines, say
from anybatch.app.records.schema import Shapes, Trace
from anybatch.app.records.tolerant_reading import plain
from anybatch.app.training.settings import Settings
from anybatch.display import table


def trace_command(task: str, settings: Settings, *, out: Path | None, is_quiet: bool) -> int:
    """Trace one update, print it and write a run folder."""
    folder, build = begin(task, out, "tracing one update of", is_quiet=is_quiet)
    from anybatch.app.lessons.update_trace import trace
    from anybatch.app.training.experiment import assemble

    # the first update is traced, so it runs at the full learning rate
    experiment = assemble(build, dataclasses.replace(settings, warmup=0, decay="none"))
    found = trace(experiment)
    say("\n".join([*plan_lines(experiment.plan), "", *_trace_lines(found), ""]), is_quiet=is_quiet)
    run = dataclasses.replace(first_record("trace", task, settings), plan=plain(experiment.plan))
    finish(folder, run, found, is_quiet=is_quiet)
    return 0


def _trace_lines(found: Trace) -> list[str]:
    from anybatch.app.report.page import lanes_of

    *parts, once = lanes_of(found.stages)
    stages = [stage for stage, _ in parts[0].cells] if parts else []
    lanes = [[lane.title, *(dict(lane.cells).get(stage, "") for stage in stages)] for lane in parts]
    rows = []
    for layer in found.layers:
        values = " ".join(f"{value:.4g}" for value in layer.values[:4])
        rows.append([layer.name, layer.kind, _shape(layer.shapes_in), _shape(layer.shapes_out), values])
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

"""`anybatch verify`: compare one accumulated batch of a task with the whole batch; the exit code is the verdict."""

import dataclasses
import json
from pathlib import Path

from anybatch.app.cli.folders import begin, finish, first_record
from anybatch.app.cli.screen import say
from anybatch.app.lessons.pages.see_lessons import lesson_of_cause, see
from anybatch.app.records.schema import ProofRecord
from anybatch.app.records.tolerant_reading import plain, read
from anybatch.app.training.settings import Settings


def verify_command(
    task: str, settings: Settings, *, memory: str | None, out: Path | None, is_json: bool, is_quiet: bool
) -> int:
    """Verify, print and write a run folder; return 0 if exact, 1 if not, 3 if it could not be judged."""
    is_silent = is_quiet or is_json
    folder, build = begin(task, out, "verifying the first batch of", is_quiet=is_silent)
    from anybatch.app.training.experiment import assemble
    from anybatch.app.training.loop import first_batch
    from anybatch.verification import verify

    experiment = assemble(build, dataclasses.replace(settings, warmup=0))
    update = experiment.update
    verdict = verify(
        experiment.task.model,
        experiment.task.objective,
        first_batch(experiment.task, batch=experiment.plan.batch, seed=settings.seed),
        micro_batch=update.accumulator.split,
        memory=memory,
        batch_norm=experiment.task.batch_norm,
        autocast=update.options.autocast,
    )
    found = verdict.as_json()
    for cause in found["causes"]:
        cause["lesson"] = lesson_of_cause(cause["kind"])
    if is_json:
        print(json.dumps(found, allow_nan=False, ensure_ascii=False), flush=True)
    lessons = sorted({cause["lesson"] for cause in found["causes"]})
    say("\n".join([verdict.describe(), *map(see, lessons), ""]), is_quiet=is_silent)
    causes = ", ".join(cause.kind for cause in verdict.causes)
    summary = {"exact": verdict.is_exact, "finding": verdict.finding, "error": verdict.error, "causes": causes}
    run = first_record("verify", task, settings)
    record = read(ProofRecord, found)
    assert record is not None
    run = dataclasses.replace(run, plan=plain(experiment.plan), summary=plain(summary))
    finish(folder, run, record, is_quiet=is_silent)
    return 0 if verdict.is_exact else 1 if verdict.is_judged else 3

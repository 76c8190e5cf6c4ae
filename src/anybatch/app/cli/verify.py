"""`anybatch verify`: one batch of a task, in one go and accumulated; the exit code says whether they agree."""

import dataclasses
import json
from pathlib import Path

from anybatch.app.cli.folders import begin, first_record, write_page
from anybatch.app.cli.screen import say
from anybatch.app.lessons.pages.see_lessons import lesson_of_cause, see
from anybatch.app.records.schema import ProofRecord
from anybatch.app.records.tolerant_reading import plain, read
from anybatch.app.training.settings import Settings


def verify_command(
    task: str, settings: Settings, *, memory: str | None, out: Path | None, is_json: bool, is_quiet: bool
) -> int:
    """Verify, print and leave a run folder; 0 if exact, 1 if not, 3 if it could not be judged."""
    is_silent = is_quiet or is_json
    folder, build = begin(task, out, "verifying the first batch of", is_quiet=is_silent)
    from anybatch.app.training.experiment import assemble
    from anybatch.app.training.loop import first_batch
    from anybatch.verification import verify

    experiment = assemble(build, dataclasses.replace(settings, warmup=0))
    batch = first_batch(experiment.task, batch=experiment.plan.batch, seed=settings.seed)
    update = experiment.update
    verdict = verify(
        experiment.task.model,
        experiment.task.objective,
        batch,
        micro_batch=update.accumulator.split,
        memory=memory,
        batch_norm=experiment.task.batch_norm,
        autocast=update.options.autocast,
    )
    run = first_record("verify", task, settings)
    summary = {
        "exact": verdict.is_exact,
        "finding": verdict.finding,
        "error": verdict.error,
        "causes": ", ".join(c.kind for c in verdict.causes),
    }
    found = verdict.as_json()
    for cause in found["causes"]:
        cause["lesson"] = lesson_of_cause(cause["kind"])
    lessons = sorted({cause["lesson"] for cause in found["causes"]})
    if is_json:
        print(json.dumps(found, allow_nan=False, ensure_ascii=False), flush=True)
    say("\n".join([verdict.describe(), *map(see, lessons)]), is_quiet=is_silent)
    folder.write(dataclasses.replace(run, plan=plain(experiment.plan), status="finished", summary=plain(summary)))
    record = read(ProofRecord, found)
    assert record is not None
    folder.write(record)
    say(f"\npage: {write_page(folder)}", is_quiet=is_silent)
    return 0 if verdict.is_exact else 1 if verdict.is_judged else 3

"""`anybatch plan`: the largest micro-batch that fits, before anything runs."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

from anybatch import __version__
from anybatch.cli.folders import check_installed, first_record, new_folder, short_name, write_page
from anybatch.cli.screen import say
from anybatch.cli.tables import table
from anybatch.errors import SettingsError
from anybatch.records import PlanRecord, read
from anybatch.sizes import parse_bytes, show_bytes
from anybatch.training import Settings, check_task_exists, find_task

if TYPE_CHECKING:
    from anybatch.memory import Plan


def plan_command(
    task: str, settings: Settings, *, memory: str | None, out: Path | None, is_json: bool, is_quiet: bool
) -> int:
    """Plan, print, and leave a folder with a page; 1 where not even one row fits."""
    check_task_exists(task)
    limit = None if memory is None else parse_bytes(memory)
    folder = None if is_json and out is None else new_folder(task, out)
    check_installed("torchdata")
    if not is_json:
        say(f"anybatch {__version__}  planning the memory of {short_name(task)}", is_quiet=is_quiet)
    planned = _plan(task, settings, limit)
    if is_json:
        say(json.dumps(planned.as_dict(), indent=1), is_quiet=False)
    else:
        for line in ["", *memory_plan_lines(planned)]:
            say(line, is_quiet=is_quiet)
    if folder is not None:
        run = first_record("plan", task, settings)
        folder.write(dataclasses.replace(run, status="finished"))
        record = read(PlanRecord, planned.as_dict() | {"sentences": planned.describe().splitlines()})
        assert record is not None
        folder.write(record)
        page = write_page(folder)
        if not is_json:
            say(f"\nwhether a batch this large pays: anybatch advise {task}", is_quiet=is_quiet)
            say(f"page: {page}", is_quiet=is_quiet)
    return 0 if planned.fits else 1


def _plan(task: str, settings: Settings, limit: int | None) -> "Plan":
    build = find_task(task)  # torch is loaded from here on
    import torch

    from anybatch.batches import Tokens
    from anybatch.memory import plan
    from anybatch.training import find_device, find_split, first_batch, seed_all

    try:
        device = find_device("auto") if settings.device == "auto" else torch.device(settings.device)
    except RuntimeError as error:
        raise SettingsError(
            f"--device {settings.device!r} is no device: {str(error).splitlines()[0][:150]}. Use cpu or cuda; it need not be "
            "here."
        ) from None
    seed_all(settings.seed)
    found = build()
    found.model.train()
    size = min(settings.batch_size or found.batch_size, len(found.training))
    split = find_split(found, settings, size)
    return plan(
        found.model,
        found.optimizer,
        found.objective,
        first_batch(found, batch=size, seed=settings.seed),
        memory=limit,
        device=device,
        split=split if isinstance(split, Tokens) else None,
        clip_norm=settings.clip_norm or found.clip_norm,
        autocast={"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[settings.precision],
        batch_norm=found.batch_norm,
    )


def memory_plan_lines(planned: "Plan") -> list[str]:
    """The plan as text: sentences, sizes, and what the peak is made of."""
    sizes = [[f"{entry.size:,}", show_bytes(entry.peak), "yes" if entry.fits else "no"] for entry in planned.sizes]
    parts = [
        [field.name, show_bytes(getattr(planned.breakdown, field.name))]
        for field in dataclasses.fields(planned.breakdown)
    ]
    head, _, *rest = planned.describe().splitlines()
    return [
        head,
        "",
        *table([planned.unit, "peak", "fits"], sizes),
        "",
        *table(["at the peak", "memory"], parts),
        "",
        *rest,
    ]

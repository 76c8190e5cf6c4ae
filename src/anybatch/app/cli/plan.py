"""`anybatch plan`: predict the largest micro-batch that fits, for a task or for a transformers config file."""

import dataclasses
import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anybatch import __version__
from anybatch.app.cli.folders import check_installed, finish, first_record, new_folder, short_name
from anybatch.app.cli.screen import say
from anybatch.app.records.schema import PlanRecord
from anybatch.app.records.tolerant_reading import read
from anybatch.app.training.settings import Settings
from anybatch.app.training.tasks.lookup import check_task_exists, find_task
from anybatch.display import parse_bytes, show_bytes, table
from anybatch.errors import SettingsError

if TYPE_CHECKING:
    from anybatch.core import Sums
    from anybatch.memory import Plan

ASSUMED_FREE = 2**35
"""Bytes of host memory that are assumed to be free if the system does not report them."""


def plan_command(
    task: str, settings: Settings, *, sums: "Sums", memory: str | None, out: Path | None, is_json: bool, is_quiet: bool
) -> int:
    """Plan a task, print the plan and write a folder with a page; return 1 if not even one row fits."""
    check_task_exists(task)
    check_installed("torchdata")
    limit = None if memory is None else parse_bytes(memory)
    return _show(task, settings, lambda: _plan(task, settings, limit, sums), out, is_json=is_json, is_quiet=is_quiet)


def config_plan_command(
    config: Path, options: dict[str, Any], settings: Settings, *, out: Path | None, is_json: bool, is_quiet: bool
) -> int:
    """Plan a language model from its config file, as `plan_command` does a task; the model is not built."""
    if find_spec("transformers") is None:
        raise SettingsError(
            f"--model {config} needs transformers. Install it with: pip install 'anybatch[huggingface]'"
        )
    # without --memory the plan is for this machine; --memory without --device is that of a GPU
    is_gpu = settings.device == "auto" and options["memory"] is not None
    device = "cuda" if is_gpu else settings.device.replace("auto", "cpu")

    def make() -> "Plan":
        from anybatch.memory import plan_config

        return plan_config(config, **{"tokens": 2048, **options}, device=device)

    return _show(str(config), settings, make, out, is_json=is_json, is_quiet=is_quiet)


def _show(
    name: str, settings: Settings, make: Callable[[], "Plan"], out: Path | None, *, is_json: bool, is_quiet: bool
) -> int:
    """Make the plan and print it; write a folder with a page unless only JSON is asked for."""
    folder = None if is_json and out is None else new_folder(name, out)
    is_quiet = is_quiet or is_json
    say(f"anybatch {__version__}  planning the memory of {short_name(name)}", is_quiet=is_quiet)
    planned = make()
    if is_json:
        say(json.dumps(planned.as_dict(), indent=1))
    say("\n".join(["", *_plan_lines(planned)]), is_quiet=is_quiet)
    if folder is not None:
        record = read(PlanRecord, planned.as_dict() | {"sentences": planned.describe().splitlines()})
        assert record is not None
        say(is_quiet=is_quiet)
        finish(folder, first_record("plan", name, settings), record, is_quiet=is_quiet)
    return 0 if planned.fits else 1


def _plan(task: str, settings: Settings, limit: int | None, sums: "Sums") -> "Plan":
    build = find_task(task)  # this loads torch
    import torch

    from anybatch.app.training.experiment import find_device, find_split
    from anybatch.app.training.loop import first_batch
    from anybatch.app.training.ranks import seed_all
    from anybatch.core import free_on_host
    from anybatch.memory import parameters_on_meta, plan
    from anybatch.ragged import Tokens

    try:
        device = find_device("auto") if settings.device == "auto" else torch.device(settings.device)
    except RuntimeError as error:
        raise SettingsError(
            f"--device {settings.device!r} is no device: {str(error).splitlines()[0][:150]}. Use cpu or cuda; it need not be "
            "here."
        ) from None
    seed_all(settings.seed)
    # a trial with real steps needs five times the weights
    with parameters_on_meta(beyond=(free_on_host() or ASSUMED_FREE) // 8):
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
        sums=sums,
    )


def _plan_lines(planned: "Plan") -> list[str]:
    sizes = [[f"{entry.size:,}", show_bytes(entry.peak), "yes" if entry.fits else "no"] for entry in planned.sizes]
    parts = [[name, show_bytes(part)] for name, part in dataclasses.asdict(planned.breakdown).items()]
    changes = [[way.change, show_bytes(way.peak), "yes" if way.fits else "no"] for way in planned.ways_to_fit]
    size = f"with {planned.micro_batch:,} {planned.unit}" if planned.fits else "with one row"
    head, _, *rest = planned.describe().splitlines()
    return [
        head,
        "",
        *table([planned.unit, "peak", "fits"], sizes),
        "",
        *table(["at the peak", "memory"], parts),
        "",
        *table([f"what to change, {size}", "peak", "fits"], changes),
        "",
        *rest,
    ]

"""Which run `anybatch train` works on: a new one, or one that goes on; with which task file, and with which settings."""

import dataclasses
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from anybatch import __version__
from anybatch.cli.folders import first_record, new_folder, short_name
from anybatch.cli.screen import say
from anybatch.errors import RunError, SettingsError, TaskError
from anybatch.records import Run, RunFolder
from anybatch.training import BUILT_IN, Launch, Settings, check_task_exists, versions


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRequest:
    """What was typed."""

    task: str | None
    settings: Settings
    given: frozenset[str]
    """Names of the options that were typed, not defaulted."""
    out: Path | None
    resume: Path | None
    tensorboard: bool
    is_quiet: bool
    rank_timeout: float = 300.0
    """Seconds that a rank waits for the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedRun:
    """A run, before its first update or after some."""

    folder: RunFolder
    run: Run
    goes_on: bool
    remarks: tuple[str, ...] = ()
    """What is another than when it was started."""


def open_run(request: TrainRequest, launch: Launch | None) -> OpenedRun:
    """The run that was asked for; nothing is written, and no code of a task is run."""
    resumed = request.resume or _run_of(launch, request)
    name = None if launch is None else launch.name
    if resumed is None:
        if request.task is None:
            raise TaskError("train needs a task, such as: anybatch train digits. See anybatch train --help.")
        check_task_exists(request.task)
        folder = new_folder(request.task, request.out)
        run = first_record("train", request.task, request.settings)
        run = dataclasses.replace(run, launch=name, task_hash=hash_of(run.task))
        return OpenedRun(folder=folder, run=run, goes_on=False)
    folder = RunFolder(resumed)
    run = folder.read_run()
    if run.kind != "train":
        raise RunError(f"{resumed} is a run of {run.kind}, which cannot be resumed. Start it anew.")
    if request.resume is not None and request.out is not None:
        raise SettingsError(f"--out {request.out} with --resume {request.resume}: a run goes on in its own folder.")
    _check_unchanged(request, run)
    task = _task_to_run(request, folder, run)
    remarks = tuple(_remarks(run, task))
    run = dataclasses.replace(
        run, launch=name, task=task, task_hash=hash_of(task), versions=versions(), anybatch=__version__
    )
    return OpenedRun(folder=folder, run=run, goes_on=True, remarks=remarks)


def hash_of(task: str) -> str | None:
    """SHA-256 of a task's file; None of a built-in task."""
    return None if task in BUILT_IN else hashlib.sha256(Path(task).read_bytes()).hexdigest()


def _task_to_run(request: TrainRequest, folder: RunFolder, run: Run) -> str:
    """The task to go on with: the one given, else the one that `run.json` names.

    A run folder may come from anywhere, and to go on with it runs the file that it names. So the file is named first, and
    one that lies inside the folder runs only if it was given, or where someone agrees.
    """
    if request.task is not None:
        check_task_exists(request.task)
        if request.task != run.task and (request.task in BUILT_IN or run.task in BUILT_IN):
            raise TaskError(
                f"{folder.path} is a run of {run.task}, not of {request.task}. Leave the task out to go on."
            )
        return request.task if request.task in BUILT_IN else str(Path(request.task).resolve())
    if run.task in BUILT_IN:
        return run.task
    path = Path(run.task)
    if not path.is_file():
        raise TaskError(
            f"the task file of this run, {path}, is not there any more. Say where it is now: anybatch train FILE "
            f"--resume {folder.path}"
        )
    say(f"its task is the file {path}, which is run now", is_quiet=request.is_quiet)
    if path.resolve().is_relative_to(folder.path.resolve()) and not _agrees(path):
        raise TaskError(
            f"{path} lies inside the run folder, and whoever made the folder may have written it. Read it, and give it "
            f"yourself to go on: anybatch train {path} --resume {folder.path}"
        )
    return run.task


def _agrees(path: Path) -> bool:
    try:
        return typer.confirm(f"{path} came with the run folder. Run it?", err=True)
    except (typer.Abort, OSError, ValueError):  # nobody is there to answer
        return False


def _remarks(run: Run, task: str) -> list[str]:
    """A line for each thing that is another than when the run was last at work."""
    found = []
    if task != run.task:
        found.append(f"the task is {task} now; the run was started with {run.task}")
    if run.task_hash is not None and hash_of(task) != run.task_hash:
        found.append(
            "the task file has changed since this run was last at work; the checkpoint fits its model or is refused"
        )
    for name, now in {"anybatch": __version__, **versions()}.items():
        before = run.anybatch if name == "anybatch" else run.versions.get(name)
        if before and before != now and name in ("anybatch", "torch", "python"):
            found.append(f"{name} is {now} now, and was {before}: the rest of the run may differ in its last digits")
    return found


def _run_of(launch: Launch | None, request: TrainRequest) -> Path | None:
    """The run that these ranks were at before torchrun restarted them; None: there is none, they begin."""
    if launch is None or launch.name is None or request.task is None:
        return None
    places = [request.out] if request.out is not None else sorted(Path("runs").glob(f"{short_name(request.task)}-*"))
    for place in places:
        if (place / "run.json").is_file() and RunFolder(place).read_run().launch == launch.name:
            return place
    return None


def device_of(request: TrainRequest) -> str:
    """Where the run computes."""
    if request.resume is None:
        return request.settings.device
    return _stored_settings(RunFolder(request.resume).read_run()).device


def settings_of(request: TrainRequest, run: Run) -> Settings:
    """As the run was started; only how ranks hold the model may be another, as their number may."""
    settings = _stored_settings(run)
    return (
        dataclasses.replace(settings, parallel=request.settings.parallel) if "parallel" in request.given else settings
    )


def _stored_settings(run: Run) -> Settings:
    stored: dict[str, Any] = dict(run.settings)
    known = {field.name for field in dataclasses.fields(Settings)}
    if not stored or stored.keys() - known:
        raise RunError(
            f"the run.json of this run of {run.task} has the settings {sorted(stored)}, which are not those of anybatch "
            f"{__version__}. Go on with the version that started it, {run.anybatch or 'which it does not name'}."
        )
    return Settings(**stored)


def _check_unchanged(request: TrainRequest, run: Run) -> None:
    wished = dataclasses.asdict(request.settings)
    for name in sorted(request.given & wished.keys() - {"parallel"}):
        if wished[name] != run.settings.get(name):
            raise SettingsError(
                f"--{name.replace('_', '-')} {wished[name]} with --resume: this run was started with "
                f"{run.settings.get(name)}, and goes on as it was. Leave the option out, or start a new run."
            )

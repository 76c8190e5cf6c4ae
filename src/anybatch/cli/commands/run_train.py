"""`anybatch train`: a new run, or one that goes on."""

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anybatch import __version__
from anybatch.cli.folders import check_installed, first_record, new_folder, short_name, write_page
from anybatch.cli.interrupts import Interrupts
from anybatch.cli.screen import plan_lines, say, screen_for, summary_line
from anybatch.errors import AnybatchError, RunError, SettingsError, TaskError
from anybatch.records import Metric, Run, RunFolder, plain
from anybatch.training import Launch, Settings, check_task_exists, find_launch, find_task, joined_ranks

if TYPE_CHECKING:
    from anybatch.training import Experiment, Progress


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


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedRun:
    """A run, before its first update or after some."""

    folder: RunFolder
    run: Run
    goes_on: bool


def train_command(request: TrainRequest) -> int:
    """Train, and leave a run folder: 0 when finished, 1 when stopped before the end.

    Under torchrun every rank comes here; rank 0 alone prints and writes, checkpoints aside.
    """
    launch = find_launch()
    is_first = launch is None or launch.rank == 0
    request = dataclasses.replace(request, is_quiet=request.is_quiet or not is_first)
    opened = _open_run(request, launch) if is_first else None
    check_installed("torchdata", *(["tensorboard"] if request.tensorboard else []))
    if opened is not None:
        say(f"anybatch {__version__}  training {short_name(opened.run.task)}", is_quiet=request.is_quiet)
    if launch is None:
        assert opened is not None
        return _train(request, opened, group=None, is_first=True)
    with joined_ranks(launch, _device(request)) as group:  # torch is loaded from here on
        from anybatch.training import from_first_rank, ranks_of_group

        opened = from_first_rank(lambda: opened, ranks_of_group(group))
        assert opened is not None
        return _train(request, opened, group=group, is_first=is_first)


def _train(request: TrainRequest, opened: OpenedRun, *, group: Any, is_first: bool) -> int:
    folder, run, is_quiet = opened.folder, opened.run, request.is_quiet
    if run.status == "finished":
        say(f"{folder.path} is finished: nothing is left to do.", is_quiet=is_quiet)
        return 0

    build = find_task(run.task)  # torch is loaded from here on
    from anybatch.training import Loop, assemble

    experiment = assemble(build, _settings(request, run), group=group)
    for line in plan_lines(experiment.plan):
        say(line, is_quiet=is_quiet)
    run = dataclasses.replace(run, plan=plain(experiment.plan), status="running")
    if is_first:
        folder.write(run)
    progress = _go_on(folder, experiment, is_first=is_first, is_quiet=is_quiet) if opened.goes_on else None
    done = progress.update if progress is not None else 0
    with ExitStack() as stack:
        interrupts = stack.enter_context(Interrupts())
        screen = stack.enter_context(screen_for(experiment.plan.updates, done, is_quiet=is_quiet))
        listeners: list[Callable[[Metric], None]] = [folder.append, screen.show] if is_first else []
        if request.tensorboard and is_first:
            from anybatch.cli.tensorboard import TensorBoard

            board = TensorBoard(folder.path, done)
            stack.callback(board.close)
            listeners.append(board.show)

        def tell(metric: Metric) -> None:
            for listener in listeners:
                listener(metric)

        loop = Loop(experiment, tell=tell, checkpoints=folder.checkpoints, progress=progress, should_stop=interrupts)
        try:
            progress = loop.run()
        except AnybatchError:
            if is_first:
                folder.write(dataclasses.replace(run, status="stopped"))
            raise
    if is_first:
        _close(folder, run, experiment, progress, is_finished=loop.is_finished, is_quiet=is_quiet)
    return 0 if loop.is_finished else 1


def _open_run(request: TrainRequest, launch: Launch | None) -> OpenedRun:
    resumed = request.resume or _run_of(launch, request)
    name = None if launch is None else launch.name
    if resumed is None:
        if request.task is None:
            raise TaskError("train needs a task, such as: anybatch train digits. See anybatch train --help.")
        check_task_exists(request.task)
        folder = new_folder(request.task, request.out)
        run = first_record("train", request.task, request.settings)
        return OpenedRun(folder=folder, run=dataclasses.replace(run, launch=name), goes_on=False)
    folder = RunFolder(resumed)
    run = folder.read_run()
    if run.kind != "train":
        raise RunError(f"{resumed} is a run of {run.kind}, which cannot be resumed. Start it anew.")
    if request.resume is not None and request.out is not None:
        raise SettingsError(f"--out {request.out} with --resume {request.resume}: a run goes on in its own folder.")
    if request.task is not None and first_record("train", request.task, request.settings).task != run.task:
        raise TaskError(f"{resumed} is a run of {run.task}, not of {request.task}. Leave the task out to go on.")
    _check_unchanged(request, run)
    return OpenedRun(folder=folder, run=dataclasses.replace(run, launch=name), goes_on=True)


def _run_of(launch: Launch | None, request: TrainRequest) -> Path | None:
    """The run that these ranks were at before torchrun restarted them; None: there is none, they begin."""
    if launch is None or launch.name is None or request.task is None:
        return None
    places = [request.out] if request.out is not None else sorted(Path("runs").glob(f"{short_name(request.task)}-*"))
    for place in places:
        if (place / "run.json").is_file() and RunFolder(place).read_run().launch == launch.name:
            return place
    return None


def _device(request: TrainRequest) -> str:
    if request.resume is None:
        return request.settings.device
    return _stored_settings(RunFolder(request.resume).read_run()).device


def _settings(request: TrainRequest, run: Run) -> Settings:
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


def _go_on(folder: RunFolder, experiment: "Experiment", *, is_first: bool, is_quiet: bool) -> "Progress | None":
    from anybatch.training import Progress, resume

    resumed = resume(folder.checkpoints, experiment.update)
    if is_first:
        folder.rewind(resumed.number if resumed is not None else 0)
    if resumed is None:
        say("no checkpoint was saved yet: starting from the first update", is_quiet=is_quiet)
        return None
    for reason in resumed.passed_over:
        say(f"passed over: {reason}", is_quiet=is_quiet)
    say(f"going on after update {resumed.number:,}, from {resumed.path}", is_quiet=is_quiet)
    return Progress.from_plain(resumed.progress, resumed.loader_state)


def _close(
    folder: RunFolder, run: Run, experiment: "Experiment", progress: "Progress", *, is_finished: bool, is_quiet: bool
) -> None:
    summary = _summary(folder, experiment, progress)
    folder.write(dataclasses.replace(run, status="finished" if is_finished else "stopped", summary=summary))
    page = write_page(folder)
    choice = getattr(experiment.update.accumulator.split, "choice", None)
    if choice is not None:
        say(f"micro-batch: {choice.describe()}", is_quiet=is_quiet)
    if summary.get("retries"):
        say(
            f"memory ran out {summary['retries']} times: those batches were started again in smaller micro-batches",
            is_quiet=is_quiet,
        )
    if is_finished:
        say(f"done: {summary_line(summary)}", is_quiet=is_quiet)
    else:
        say(f"stopped after update {progress.update:,} of {experiment.plan.updates:,}, and saved.", is_quiet=is_quiet)
    say(f"page: {page}", is_quiet=is_quiet)
    if not is_finished:
        say(f"go on with: anybatch train --resume {folder.path}", is_quiet=is_quiet)


def _summary(folder: RunFolder, experiment: "Experiment", progress: "Progress") -> dict[str, Any]:
    updates = [line for line in folder.read_metrics() if line["event"] == "update"]
    summary: dict[str, Any] = {"updates": progress.update, "epochs": progress.epoch - 1}
    if progress.last:
        summary |= {"train_loss": progress.last["train_loss"], "valid_loss": progress.last["valid_loss"]}
        summary |= dict(progress.last["metrics"])
        judge = experiment.task.metric
        summary["lowest_valid_loss" if judge is None else f"best_{judge}"] = progress.best
    summary["rows_seen"] = sum(line["rows"] for line in updates)
    retries = sum(line.get("retries", 0) for line in updates)
    if retries:
        summary["retries"] = retries
    summary["seconds"] = round(sum(line["seconds"] for line in updates), 3)
    return summary

"""`anybatch train`: a new run, or one that goes on; with which task file, and with which settings."""

import dataclasses
import hashlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import typer

from anybatch import __version__
from anybatch.app.cli.folders import (
    check_installed,
    first_record,
    its_end_told,
    new_folder,
    short_name,
    versions,
    write_page,
)
from anybatch.app.cli.screen import plan_lines, say, screen_for, summary_line
from anybatch.app.records.run_folder import RunFolder, locked, read_results
from anybatch.app.records.schema import EpochDone, Metric, Run, UpdateDone
from anybatch.app.records.tolerant_reading import plain
from anybatch.app.training.launch import Launch, find_launch, joined_ranks
from anybatch.app.training.settings import Settings
from anybatch.app.training.tasks.lookup import BUILT_IN, check_task_exists, find_task
from anybatch.errors import RunError, SettingsError, TaskError

if TYPE_CHECKING:
    from anybatch.app.training.experiment import Experiment
    from anybatch.app.training.loop import Progress


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
    remarks: Sequence[str] = ()
    """Differences from the original run."""


def train_command(request: TrainRequest) -> int:
    """Train, and leave a run folder: 0 when finished, 1 when stopped before the end or its validation loss is nan.

    Under torchrun every rank comes here; rank 0 alone prints and writes, checkpoints aside.
    """
    launch = find_launch()
    is_first = launch is None or launch.rank == 0
    request = dataclasses.replace(request, is_quiet=request.is_quiet or not is_first)
    check_installed("torchdata", *(["tensorboard"] if request.tensorboard else []))
    with ExitStack() as stack:
        opened = None
        if is_first:
            opened = open_run(request, launch)
            stack.enter_context(locked(opened.folder.path))
            say(f"anybatch {__version__}  training {short_name(opened.run.task)}", is_quiet=request.is_quiet)
            for remark in opened.remarks:
                say(f"note    {remark}", is_quiet=request.is_quiet)
        if launch is None:
            assert opened is not None
            return _train(request, opened, group=None, is_first=True)
        ranks = joined_ranks(launch, device_of(request), seconds=request.rank_timeout)
        group = stack.enter_context(ranks)  # torch is loaded from here on
        from anybatch.app.training.ranks import from_first_rank, ranks_of_group

        opened = from_first_rank(lambda: opened, ranks_of_group(group))
        assert opened is not None
        return _train(request, opened, group=group, is_first=is_first)


def _train(request: TrainRequest, opened: OpenedRun, *, group: Any, is_first: bool) -> int:
    folder, run, is_quiet = opened.folder, opened.run, request.is_quiet
    if run.status == "finished":
        if is_first and not (folder.path / "report.html").exists():  # a kill came before it was written
            write_page(folder)
        say(f"{folder.path} is finished: nothing is left to do.", is_quiet=is_quiet)
        return 0

    with its_end_told(folder, run) if is_first and opened.goes_on else nullcontext():
        build = find_task(run.task)  # torch is loaded from here on
        from anybatch.app.training.experiment import assemble
        from anybatch.app.training.loop import Loop

        experiment = assemble(build, settings_of(request, run), group=group)
    run = dataclasses.replace(run, plan=plain(experiment.plan), status="running", reason="", summary={})
    with ExitStack() as stack:
        if is_first:
            folder.write(run)
            stack.enter_context(its_end_told(folder, run))
        for line in plan_lines(experiment.plan):
            say(line, is_quiet=is_quiet)
        progress = _go_on(folder, experiment, is_first=is_first, is_quiet=is_quiet) if opened.goes_on else None
        done = progress.update if progress is not None else 0
        should_stop = stack.enter_context(interrupts())
        show = stack.enter_context(screen_for(experiment.plan.updates, done, is_quiet=is_quiet))
        listeners: list[Callable[[Metric], None]] = [folder.append, show] if is_first else []
        if request.tensorboard and is_first:
            listeners.append(tensorboard_writer(stack, folder.path, done))

        def tell(metric: Metric) -> None:
            for listener in listeners:
                listener(metric)

        loop = Loop(
            experiment,
            tell=tell,
            checkpoints=folder.checkpoints,
            progress=progress,
            should_stop=should_stop,
            note=lambda text: say(f"note    {text}", is_quiet=is_quiet),
            before_save=(lambda: folder.keep(run)) if is_first else lambda: None,
        )
        progress = loop.run()
    if is_first:
        _close(folder, run, experiment, progress, is_finished=loop.is_finished, is_quiet=is_quiet)
    return 0 if loop.is_finished and not isnan(progress.last.get("valid_loss", 0.0)) else 1


def _go_on(folder: RunFolder, experiment: "Experiment", *, is_first: bool, is_quiet: bool) -> "Progress | None":
    from anybatch.app.training.checkpoints import resume
    from anybatch.app.training.loop import Progress

    resumed = resume(folder.checkpoints, experiment.update)
    num_unreadable = folder.rewind(resumed.number if resumed is not None else 0) if is_first else 0
    if num_unreadable:
        say(f"{num_unreadable} lines of {folder.metrics} could not be read, and are left out", is_quiet=is_quiet)
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
    lines = []
    choice = getattr(experiment.update.accumulator.split, "choice", None)
    if choice is not None:
        lines.append(f"micro-batch: {choice.describe()}")
    if summary.get("retries"):
        lines.append(
            f"memory ran out {summary['retries']} times: those batches were started again in smaller micro-batches"
        )
    if isnan(progress.last.get("valid_loss", 0.0)):
        lines.append("the validation loss is nan: what the model learnt is of no use")
    if is_finished:
        lines.append(f"done: {summary_line(summary)}")
    else:
        lines.append(f"stopped after update {progress.update:,} of {experiment.plan.updates:,}, and saved.")
    say("\n".join(lines), is_quiet=is_quiet)
    status, reason = ("finished", "") if is_finished else ("stopped", "someone asked it to stop")
    folder.write(dataclasses.replace(run, status=status, reason=reason, summary=summary))
    say(f"page: {write_page(folder)}", is_quiet=is_quiet)
    if not is_finished:
        say(f"go on with: anybatch train --resume {folder.path}", is_quiet=is_quiet)


def _summary(folder: RunFolder, experiment: "Experiment", progress: "Progress") -> dict[str, Any]:
    updates = read_results(folder.path).updates
    summary: dict[str, Any] = {"updates": progress.update, "epochs": progress.epoch - 1}
    if progress.last:
        summary |= {"train_loss": progress.last["train_loss"], "valid_loss": progress.last["valid_loss"]}
        summary |= dict(progress.last["metrics"])
        judge = experiment.task.metric
        summary["lowest_valid_loss" if judge is None else f"best_{judge}"] = progress.best
    summary["rows_seen"] = sum(done.rows or 0 for done in updates)
    retries = sum(done.retries or 0 for done in updates)
    if retries:
        summary["retries"] = retries
    summary["seconds"] = round(sum(done.seconds or 0.0 for done in updates), 3)
    return summary


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
    remarks = _remarks(run, task)
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
    """Tell in a line each how the machine and the task differ from when the run was last at work."""
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
    parallel = request.settings.parallel if "parallel" in request.given else settings.parallel
    return dataclasses.replace(settings, parallel=parallel)


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


@contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """A block in which the first SIGINT, SIGTERM or SIGHUP is only noted; a second SIGINT interrupts as usual.

    Its function tells whether one came. A signal that is ignored when the block begins, as `nohup` and shells without a
    terminal have it, stays ignored.
    """
    is_wished = False
    before: dict[int, Any] = {}

    def take_note(number: int, frame: FrameType | None) -> None:
        nonlocal is_wished
        if is_wished and number == signal.SIGINT:
            raise KeyboardInterrupt
        is_wished = True

    if threading.current_thread() is threading.main_thread():  # Python hands signals to no other
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # Windows has no SIGHUP
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, take_note)
    try:
        yield lambda: is_wished
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def tensorboard_writer(stack: ExitStack, folder: Path, update: int) -> Callable[[Metric], None]:
    """Write each record into `tensorboard/` of the run folder; after a resume, what was undone is purged.

    The step is the number of the update. The files are closed with the stack.
    """
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=update + 1 if update else None)
    stack.callback(writer.close)

    def show(metric: Metric) -> None:
        if isinstance(metric, UpdateDone):
            for name in ("loss", "grad_norm", "lr"):
                writer.add_scalar(f"update/{name}", getattr(metric, name), metric.update)
        elif isinstance(metric, EpochDone):
            writer.add_scalars("epoch/loss", {"train": metric.train_loss, "valid": metric.valid_loss}, metric.update)
            for name, value in metric.metrics.items():
                writer.add_scalar(f"epoch/{name}", value, metric.update)

    return show

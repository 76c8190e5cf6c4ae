"""`anybatch train`: start a run or resume one, train, and write its folder."""

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
from anybatch.app.cli import folders
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


@dataclass(frozen=True, slots=True)
class TrainRequest:
    """Arguments of one `anybatch train`."""

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


@dataclass(frozen=True, slots=True)
class OpenedRun:
    """A new or resumed run before it trains."""

    folder: RunFolder
    run: Run
    goes_on: bool
    remarks: Sequence[str] = ()
    """Differences from the original run."""


def train_command(request: TrainRequest) -> int:
    """Train and write a run folder; return 0 if finished, 1 if stopped early or the validation loss is nan.

    Under torchrun every rank runs this. Rank 0 alone prints and writes, except for checkpoints.
    """
    launch = find_launch()
    is_first = launch is None or launch.rank == 0
    request = dataclasses.replace(request, is_quiet=request.is_quiet or not is_first)
    folders.check_installed("torchdata", *(["tensorboard"] if request.tensorboard else []))
    with ExitStack() as stack:
        opened, group = None, None
        if is_first:
            opened = open_run(request, launch)
            stack.enter_context(locked(opened.folder.path))
            say(f"anybatch {__version__}  training {folders.short_name(opened.run.task)}", is_quiet=request.is_quiet)
            for remark in opened.remarks:
                say(f"note    {remark}", is_quiet=request.is_quiet)
        if launch is not None:
            resumed = None if request.resume is None else _stored_settings(RunFolder(request.resume).read_run())
            ranks = joined_ranks(launch, (resumed or request.settings).device, seconds=request.rank_timeout)
            group = stack.enter_context(ranks)  # this loads torch
            from anybatch.app.training.ranks import from_first_rank, ranks_of_group

            opened = from_first_rank(lambda: opened, ranks_of_group(group))
        assert opened is not None
        return _train(request, opened, group=group, is_first=is_first)


def _train(request: TrainRequest, opened: OpenedRun, *, group: Any, is_first: bool) -> int:
    folder, run, is_quiet = opened.folder, opened.run, request.is_quiet
    if run.status == "finished":
        if is_first and not (folder.path / "report.html").exists():  # the run was killed before its page was written
            folders.write_page(folder)
        say(f"{folder.path} is finished: nothing is left to do.", is_quiet=is_quiet)
        return 0

    with folders.recording_failure(folder, run) if is_first and opened.goes_on else nullcontext():
        build = find_task(run.task)  # this loads torch
        from anybatch.app.training.experiment import assemble
        from anybatch.app.training.loop import Loop

        settings = _stored_settings(run)
        if "parallel" in request.given:  # like the number of ranks, this may change on resume
            settings = dataclasses.replace(settings, parallel=request.settings.parallel)
        experiment = assemble(build, settings, group=group)
    run = dataclasses.replace(run, plan=plain(experiment.plan), status="running", reason="", summary={})
    with ExitStack() as stack:
        if is_first:
            folder.write(run)
            stack.enter_context(folders.recording_failure(folder, run))
        say("\n".join(plan_lines(experiment.plan)), is_quiet=is_quiet)
        progress = _restore(folder, experiment, is_first=is_first, is_quiet=is_quiet) if opened.goes_on else None
        done = progress.update if progress is not None else 0
        should_stop = stack.enter_context(_interrupts())
        show = stack.enter_context(screen_for(experiment.plan.updates, done, is_quiet=is_quiet))
        listeners: list[Callable[[Metric], None]] = [folder.append, show] if is_first else []
        if request.tensorboard and is_first:
            listeners.append(_tensorboard_writer(stack, folder.path, done))

        def send(metric: Metric) -> None:
            for listener in listeners:
                listener(metric)

        loop = Loop(
            experiment,
            tell=send,
            checkpoints=folder.checkpoints,
            progress=progress,
            should_stop=should_stop,
            note=lambda text: say(f"note    {text}", is_quiet=is_quiet),
            before_save=(lambda: folder.keep(run)) if is_first else lambda: None,
        )
        progress = loop.run()
    if is_first:
        _finish(folder, run, experiment, progress, is_finished=loop.is_finished, is_quiet=is_quiet)
    return 0 if loop.is_finished and not isnan(progress.last.get("valid_loss", 0.0)) else 1


def _restore(folder: RunFolder, experiment: "Experiment", *, is_first: bool, is_quiet: bool) -> "Progress | None":
    """Restore the newest readable checkpoint, and drop later records; None if there is no checkpoint."""
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


def _finish(
    folder: RunFolder, run: Run, experiment: "Experiment", progress: "Progress", *, is_finished: bool, is_quiet: bool
) -> None:
    """Print how the run ended, and write its last record and its page."""
    summary = _summary(folder, experiment, progress)
    lines = []
    choice = getattr(experiment.update.accumulator.split, "choice", None)
    if choice is not None:
        lines.append(f"micro-batch: {choice.describe()}")
    if retries := summary.get("retries"):
        lines.append(f"memory ran out {retries} times: those batches were started again in smaller micro-batches")
    if isnan(progress.last.get("valid_loss", 0.0)):
        lines.append("the validation loss is nan: what the model learnt is of no use")
    if is_finished:
        lines.append(f"done: {summary_line(summary)}")
    else:
        lines.append(f"stopped after update {progress.update:,} of {experiment.plan.updates:,}, and saved.")
    say("\n".join(lines), is_quiet=is_quiet)
    status, reason = ("finished", "") if is_finished else ("stopped", "someone asked it to stop")
    folder.write(dataclasses.replace(run, status=status, reason=reason, summary=summary))
    say(f"page: {folders.write_page(folder)}", is_quiet=is_quiet)
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
    if retries := sum(done.retries or 0 for done in updates):
        summary["retries"] = retries
    summary["seconds"] = round(sum(done.seconds or 0.0 for done in updates), 3)
    return summary


def open_run(request: TrainRequest, launch: Launch | None) -> OpenedRun:
    """Return the requested run, new or resumed. Writes nothing, and runs no code of the task."""
    resumed = request.resume or _restarted_run(launch, request)
    name = None if launch is None else launch.name
    if resumed is None:
        if request.task is None:
            raise TaskError("train needs a task, such as: anybatch train digits. See anybatch train --help.")
        check_task_exists(request.task)
        folder = folders.new_folder(request.task, request.out)
        run = folders.first_record("train", request.task, request.settings)
        return OpenedRun(folder, dataclasses.replace(run, launch=name, task_hash=_hash(run.task)), goes_on=False)
    folder = RunFolder(resumed)
    run = folder.read_run()
    if run.kind != "train":
        raise RunError(f"{resumed} is a run of {run.kind}, which cannot be resumed. Start it anew.")
    if request.resume is not None and request.out is not None:
        raise SettingsError(f"--out {request.out} with --resume {request.resume}: a run goes on in its own folder.")
    wished = dataclasses.asdict(request.settings)
    for option in sorted(request.given & wished.keys() - {"parallel"}):
        if wished[option] != run.settings.get(option):
            raise SettingsError(
                f"--{option.replace('_', '-')} {wished[option]} with --resume: this run was started with "
                f"{run.settings.get(option)}, and goes on as it was. Leave the option out, or start a new run."
            )
    task, versions = _task_to_run(request, folder, run), folders.versions()
    remarks = list(_differences(run, task, {"anybatch": __version__, **versions}))
    run = dataclasses.replace(
        run, launch=name, task=task, task_hash=_hash(task), versions=versions, anybatch=__version__
    )
    return OpenedRun(folder, run, goes_on=True, remarks=remarks)


def _hash(task: str) -> str | None:
    """Return the SHA-256 of a task's file; None for a built-in task."""
    return None if task in BUILT_IN else hashlib.sha256(Path(task).read_bytes()).hexdigest()


def _task_to_run(request: TrainRequest, folder: RunFolder, run: Run) -> str:
    """Return the task of a resumed run: the one that was typed, else the one that `run.json` names.

    A run folder may come from anyone, and resuming it runs the file that it names. So the file is printed first, and a file
    inside the folder runs only if it was typed or the user agrees.
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
    except (typer.Abort, OSError, ValueError):  # there is no terminal to answer from
        return False


def _differences(run: Run, task: str, versions: dict[str, str]) -> Iterator[str]:
    """Yield a sentence for each difference between this machine and task and those of the run so far."""
    if task != run.task:
        yield f"the task is {task} now; the run was started with {run.task}"
    if run.task_hash is not None and _hash(task) != run.task_hash:
        yield "the task file has changed since this run was last at work; the checkpoint fits its model or is refused"
    for name in ("anybatch", "python", "torch"):
        now, before = versions.get(name), run.anybatch if name == "anybatch" else run.versions.get(name)
        if now and before and before != now:
            yield f"{name} is {now} now, and was {before}: the rest of the run may differ in its last digits"


def _restarted_run(launch: Launch | None, request: TrainRequest) -> Path | None:
    """Return the folder of the run that torchrun restarted; None on a first start."""
    if launch is None or launch.name is None or request.task is None:
        return None
    pattern = f"{folders.short_name(request.task)}-*"
    for path in [request.out] if request.out is not None else sorted(Path("runs").glob(pattern)):
        if (path / "run.json").is_file() and RunFolder(path).read_run().launch == launch.name:
            return path
    return None


def _stored_settings(run: Run) -> Settings:
    stored: dict[str, Any] = dict(run.settings)
    known = {field.name for field in dataclasses.fields(Settings)}
    if not stored or stored.keys() - known:
        raise RunError(
            f"the run.json of this run of {run.task} has the settings {sorted(stored)}, which are not those of anybatch "
            f"{__version__}. Go on with the version that started it, {run.anybatch or 'which it does not name'}."
        )
    return Settings(**stored)


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Catch SIGINT, SIGTERM and SIGHUP; yield a function that returns whether one came. A second SIGINT interrupts.

    Signals that are ignored on entry, as under `nohup`, stay ignored.
    """
    is_requested = False
    before: dict[int, Any] = {}

    def request_stop(number: int, frame: FrameType | None) -> None:
        nonlocal is_requested
        if is_requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        is_requested = True

    if threading.current_thread() is threading.main_thread():  # Python delivers signals to no other thread
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # Windows has no SIGHUP
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, request_stop)
    try:
        yield lambda: is_requested
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _tensorboard_writer(stack: ExitStack, folder: Path, update: int) -> Callable[[Metric], None]:
    """Return a function that writes each record into `tensorboard/`; later steps of an earlier process are purged."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=update + 1 if update else None)
    stack.callback(writer.close)

    def write(metric: Metric) -> None:
        if isinstance(metric, UpdateDone):
            for name in ("loss", "grad_norm", "lr"):
                writer.add_scalar(f"update/{name}", getattr(metric, name), metric.update)
        elif isinstance(metric, EpochDone):
            writer.add_scalars("epoch/loss", {"train": metric.train_loss, "valid": metric.valid_loss}, metric.update)
            for name, value in metric.metrics.items():
                writer.add_scalar(f"epoch/{name}", value, metric.update)

    return write

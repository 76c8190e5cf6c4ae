"""`anybatch train`: a new run, or one that goes on."""

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from math import isnan
from typing import TYPE_CHECKING, Any

from anybatch import __version__
from anybatch.cli.commands.opened_run import OpenedRun, TrainRequest, device_of, open_run, settings_of
from anybatch.cli.commands.run_ending import its_end_told
from anybatch.cli.folders import check_installed, short_name, write_page
from anybatch.cli.interrupts import Interrupts
from anybatch.cli.screen import plan_lines, say, screen_for, summary_line
from anybatch.records import Metric, Run, RunFolder, locked, plain, read_results
from anybatch.training import find_launch, find_task, joined_ranks

if TYPE_CHECKING:
    from anybatch.training import Experiment, Progress


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
        from anybatch.training import from_first_rank, ranks_of_group

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
        from anybatch.training import Loop, assemble

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

        loop = Loop(
            experiment,
            tell=tell,
            checkpoints=folder.checkpoints,
            progress=progress,
            should_stop=interrupts,
            note=lambda text: say(f"note    {text}", is_quiet=is_quiet),
            before_save=(lambda: folder.keep(run)) if is_first else lambda: None,
        )
        progress = loop.run()
    if is_first:
        _close(folder, run, experiment, progress, is_finished=loop.is_finished, is_quiet=is_quiet)
    return 0 if loop.is_finished and not isnan(progress.last.get("valid_loss", 0.0)) else 1


def _go_on(folder: RunFolder, experiment: "Experiment", *, is_first: bool, is_quiet: bool) -> "Progress | None":
    from anybatch.training import Progress, resume

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
    choice = getattr(experiment.update.accumulator.split, "choice", None)
    if choice is not None:
        say(f"micro-batch: {choice.describe()}", is_quiet=is_quiet)
    if summary.get("retries"):
        say(
            f"memory ran out {summary['retries']} times: those batches were started again in smaller micro-batches",
            is_quiet=is_quiet,
        )
    if isnan(progress.last.get("valid_loss", 0.0)):
        say("the validation loss is nan: what the model learnt is of no use", is_quiet=is_quiet)
    if is_finished:
        say(f"done: {summary_line(summary)}", is_quiet=is_quiet)
    else:
        say(f"stopped after update {progress.update:,} of {experiment.plan.updates:,}, and saved.", is_quiet=is_quiet)
    reason = "" if is_finished else "someone asked it to stop"
    status = "finished" if is_finished else "stopped"
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

"""`anybatch advise`: whether a batch is worth it, in three sentences, a table and a page."""

import dataclasses
from pathlib import Path

from anybatch import __version__
from anybatch.cli.folders import check_installed, first_record, new_folder, short_name, write_page
from anybatch.cli.rates import parse_bandwidth, parse_latency
from anybatch.cli.screen import say
from anybatch.cli.tables import table
from anybatch.errors import SettingsError
from anybatch.records import AdviceRecord, Results, Run, RunFolder, read_results
from anybatch.training import Settings, check_task_exists, find_task


def advise_command(
    task: str, settings: Settings, *, network: tuple[int, str, str] | None, out: Path | None, is_quiet: bool
) -> int:
    """Advise, print, and leave a page; 1 where nothing can be said."""
    check_installed("torchdata")
    if (Path(task) / Run.file).is_file():
        if network is not None:
            raise SettingsError(
                f"--ranks {network[0]} with a run: its times are those of the ranks it had. Give a task."
            )
        folder = RunFolder(Path(task))
        results = read_results(folder.path)
        say(f"anybatch {__version__}  advice on {short_name(results.run.task)}, from {folder.path}", is_quiet=is_quiet)
        found = _from_run(results)
    else:
        check_task_exists(task)
        folder = new_folder(task, out)
        say(
            f"anybatch {__version__}  advice on {short_name(task)}: {settings.updates} updates, each measured",
            is_quiet=is_quiet,
        )
        found = _from_task(task, settings, network)
        folder.write(dataclasses.replace(first_record("advise", task, settings), status="finished"))
    folder.write(found)
    page = write_page(folder)
    for line in ["", *advice_lines(found), "", f"page: {page}"]:
        say(line, is_quiet=is_quiet)
    return 1 if found.reason else 0


def _from_run(results: Results) -> AdviceRecord:
    from anybatch.advice import advise_run

    return advise_run(results)


def _from_task(task: str, settings: Settings, network: tuple[int, str, str] | None) -> AdviceRecord:
    build = find_task(task)  # torch is loaded from here on
    from anybatch.advice import advise, try_task
    from anybatch.projection import Network

    connected = None
    if network is not None:
        ranks, bandwidth, latency = network
        connected = Network(ranks=ranks, bandwidth=parse_bandwidth(bandwidth), latency=parse_latency(latency))
    trial = try_task(build, settings, network=connected)
    ranks = 1 if connected is None else connected.ranks
    return advise(trial.tradeoff, micro_batch=trial.micro_batch, ranks=ranks, reason=trial.reason)


def advice_lines(advice: AdviceRecord) -> list[str]:
    """The advice as text: the sentences, and what each batch would take."""
    if not advice.outlook:
        return list(advice.sentences)
    rows = [
        [
            f"{one.batch:,}{' (yours)' if one.batch == advice.batch else ''}",
            f"{one.updates:.2f}",
            f"{one.samples:.2f}",
            "-" if one.seconds is None else f"{one.seconds:.2f}",
        ]
        for one in advice.outlook
    ]
    return [
        *advice.sentences,
        "",
        "to the same loss, as multiples of yours",
        *table(["batch", "updates", "samples", "time"], rows),
    ]

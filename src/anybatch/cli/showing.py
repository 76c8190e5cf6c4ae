"""Commands that show what is there: lessons, the page of a run, what its batch is worth, whether it holds on a device."""

from pathlib import Path
from typing import Annotated

import typer

from anybatch.cli import arguments as opt


def learn(
    page: Annotated[
        str | None, typer.Argument(metavar="PAGE", help="One lesson; all nine if none is given.", show_default=False)
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write the page there.")] = None,
    site: Annotated[
        Path | None, typer.Option("--site", metavar="FOLDER", help="Write a static site for a server instead.")
    ] = None,
    quiet: opt.Quiet = False,
) -> int:
    """Learn gradient accumulation by doing it: nine short pages, one file, no network.

    trace, zero, rows, units, memory, rate, limits, write, recall. Without --out the page is opened in the browser.

    Example: anybatch learn units
    """
    from anybatch.cli.commands import learn_command

    return learn_command(page, out=out, site=site, is_quiet=quiet)


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)],
    quiet: opt.Quiet = False,
) -> int:
    """Make the page of a run again, from the files in its folder.

    Example: anybatch report runs/digits-20261115-120000
    """
    from anybatch.cli.folders import write_page
    from anybatch.cli.screen import say
    from anybatch.records import RunFolder

    folder = RunFolder(run)
    folder.read_run()
    page = write_page(folder)
    say(f"page: {page}", is_quiet=quiet)
    return 0


def self_test(
    device: opt.Device = "auto",
    rows: Annotated[
        int | None, typer.Option("--rows", metavar="N", min=64, help="Rows of the batches that memory is filled with.")
    ] = None,
    out: opt.Out = None,
    quiet: opt.Quiet = False,
) -> int:
    """Does it hold on this device? Exactness, running out of memory, what fits, plans and speed, in some two minutes.

    Prints a table, and writes a page and a JSON to attach to an issue. Exit code 0 if every check passes, 1 if not.

    Example: anybatch self-test --device cuda
    """
    from anybatch.cli.commands import self_test_command

    return self_test_command(device, rows=rows, out=out, is_quiet=quiet)


def advise(
    task: Annotated[
        str,
        typer.Argument(
            metavar="TASK | RUN", help="A task, or a run that was trained with --noise.", show_default=False
        ),
    ],
    batch_size: opt.BatchSize = None,
    micro_batch: opt.MicroBatch = None,
    lr: opt.LR = None,
    updates: Annotated[
        int, typer.Option("--updates", metavar="N", help="Updates to measure a task in; more see more of the training.")
    ] = 100,
    ranks: opt.RanksOption = None,
    bandwidth: opt.Bandwidth = None,
    latency: opt.Latency = None,
    seed: opt.Seed = 0,
    device: opt.Device = "auto",
    out: opt.Out = None,
    quiet: opt.Quiet = False,
) -> int:
    """Say what a larger or a smaller batch would bring: updates, samples, time. Exit code 1 where nothing can be said.

    A task is trained for a short while, and every update is measured. Of a run, what it recorded is read.

    Example: anybatch advise stdlib

    Example: anybatch advise runs/stdlib-20261115-120000
    """
    from anybatch.cli.commands import advise_command
    from anybatch.training import Settings

    if ranks is None:
        opt.refuse_without_ranks(bandwidth=bandwidth, latency=latency)
    size = opt.rows_of(micro_batch)
    settings = Settings(
        batch_size=batch_size, micro_batch=size, lr=lr, updates=updates, noise=1, seed=seed, device=device
    )
    network = None if ranks is None else (ranks, bandwidth or "25GB/s", latency or "10us")
    return advise_command(task, settings, network=network, out=out, is_quiet=quiet)

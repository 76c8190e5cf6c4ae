"""Commands that show what is there: lessons, the page of a run, whether it holds on a device."""

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

"""`anybatch doctor`: its options, and the request that they make."""

from pathlib import Path
from typing import Annotated

import typer

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SCRIPT|-- COMMAND", help="A Python script with its arguments, or -- and a command.", show_default=False
    ),
]
UpdatesSeen = Annotated[int, typer.Option("--updates", metavar="N", help="End the script after so many; 0: never.")]
ShortEpochs = Annotated[
    int,
    typer.Option("--short-epochs", metavar="N", help="Batches of an epoch; a prime leaves a tail for every N; 0: all."),
]
LogFolder = Annotated[
    Path | None,
    typer.Option("--log", metavar="FOLDER", help="Keep the logs here; without a script, judge those that are there."),
]
DoctorPage = Annotated[Path | None, typer.Option("--page", metavar="FILE", help="Write a page to look at.")]
SarifFile = Annotated[Path | None, typer.Option("--sarif", metavar="FILE", help="Write the findings as SARIF 2.1.0.")]
FailOn = Annotated[
    str, typer.Option("--fail-on", metavar="SEVERITY", help="Exit 1 at error, warning or note; or never.")
]
DoctorJson = Annotated[bool, typer.Option("--json", help="Print one JSON object: findings and updates.")]
GitHub = Annotated[bool, typer.Option("--github", help="Print annotations for GitHub's actions.")]
Static = Annotated[bool, typer.Option("--static", help="Do not run; hints from the source alone.")]
Compiling = Annotated[bool, typer.Option("--compile", help="Leave torch.compile on; it hides losses.")]


def doctor(
    script: Words = None,
    updates: UpdatesSeen = 20,
    short_epochs: ShortEpochs = 13,
    log: LogFolder = None,
    page: DoctorPage = None,
    sarif: SarifFile = None,
    fail_on: FailOn = "error",
    is_json: DoctorJson = False,
    github: GitHub = False,
    static: Static = False,
    compiling: Compiling = False,
) -> int:
    """Run your own script, watch its training loop, and say what is wrong with it. Exit code 0 clean, 1 errors, 2 usage.

    Example: anybatch doctor train.py --epochs 1

    Example: anybatch doctor -- torchrun --nproc-per-node 2 train.py
    """
    from anybatch.cli.commands import DoctorRequest, doctor_command

    if not script and log is None:
        raise typer.BadParameter("name a script, or -- and a command; or --log with the folder of an earlier run.")
    request = DoctorRequest(
        words=tuple(script or ()),
        updates=updates,
        short_epochs=short_epochs,
        log=log,
        page=page,
        sarif=sarif,
        fail_on=fail_on,
        is_json=is_json,
        is_github=github,
        is_static=static,
        is_compiling=compiling,
    )
    return doctor_command(request)


app.command()(learn)

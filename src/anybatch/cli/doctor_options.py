"""The options of `anybatch doctor`."""

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
Static = Annotated[bool, typer.Option("--static", hidden=True)]
Compiling = Annotated[bool, typer.Option("--compile", help="Leave torch.compile on; it hides losses.")]

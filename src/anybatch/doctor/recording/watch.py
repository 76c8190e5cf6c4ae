"""Options of the recorder, and how it ends a script. No torch: they are read before a watched script imports it."""

import json
from dataclasses import asdict, dataclass

VARIABLE = "ANYBATCH_DOCTOR"
"""The environment variable that carries the options to every process of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """Options of the recorder. 0 stands for no end and for whole epochs."""

    folder: str
    updates: int = 20
    short_epochs: int = 13

    def as_environment(self) -> dict[str, str]:
        """For the processes of a run."""
        return {VARIABLE: json.dumps(asdict(self))}


class Ending(SystemExit):
    """Raised in the script once the updates asked for are seen: a clean exit that no `except Exception` catches."""

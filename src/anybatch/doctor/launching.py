"""Starting somebody's script under watch: the environment that reaches every process of it."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from anybatch.errors import DoctorError

if TYPE_CHECKING:
    from anybatch.doctor.recording import Watch

STARTUP = Path(__file__).parent / "startup"


def command_of(words: Sequence[str]) -> list[str]:
    """`train.py --epochs 1` is run by this Python; anything else is a command of its own, such as torchrun."""
    first = words[0]
    if first.endswith(".py"):
        if not Path(first).is_file():
            raise DoctorError(f"there is no file {first}; anybatch doctor takes a Python script, or -- and a command.")
        return [sys.executable, *words]
    if shutil.which(first) is None:
        raise DoctorError(f"there is no command {first}; anybatch doctor takes a Python script, or -- and a command.")
    return list(words)


def watched_environment(watch: "Watch", *, is_compiling: bool, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What every process of the run is started with; torch.compile is off unless asked for, since it hides losses."""
    path = os.pathsep.join(filter(None, [str(STARTUP), base.get("PYTHONPATH", "")]))
    compiling = {} if is_compiling else {"TORCHDYNAMO_DISABLE": "1"}
    return {**base, **watch.as_environment(), **compiling, "PYTHONPATH": path}


def run_watched(words: Sequence[str], watch: "Watch", *, is_compiling: bool, is_quiet: bool) -> int:
    """The exit code of the script; it has our terminal, or stderr for all it says where stdout is to stay clean."""
    environment = watched_environment(watch, is_compiling=is_compiling)
    done = subprocess.run(command_of(words), env=environment, stdout=sys.stderr if is_quiet else None, check=False)
    return done.returncode

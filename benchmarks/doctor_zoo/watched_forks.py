"""Many scripts under watch, each in a fork of one process that has loaded torch and the frameworks."""

import importlib
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from benchmarks.doctor_zoo.zoo_scripts import ZooScript

LOADED = {"transformers": ("Trainer", "GPT2LMHeadModel", "LlamaForCausalLM")}
"""Names that a lazy package loads only when asked."""
MOST_SECONDS = 300
"""Of one script: one that hangs counts as failed. DeepSpeed compiles an extension at its first run."""


def watch_forked(scripts: Iterable[ZooScript], folder: Path) -> list[str]:
    """Leaves `folder/NAME.py`, its log in `folder/NAME/`, what it printed in `folder/NAME.out`; tells which scripts failed."""
    failed = []
    wanted = list(scripts)
    for name in sorted({name for script in wanted for name in script.frameworks}):
        package = importlib.import_module(name)
        for inner in LOADED.get(name, ()):
            getattr(package, inner)
    paths = [script.write(folder) for script in wanted]
    for path, script in zip(paths, wanted, strict=True):
        if script.launch == "module":
            continue
        child = os.fork()
        if not child:
            os._exit(_watch(path))
        _, status = os.waitpid(child, 0)
        if status:
            failed.append(f"{script.name} failed under watch:\n{path.with_suffix('.out').read_text()[-1500:]}")
    return failed


def _watch(path: Path) -> int:
    """In the fork: the exit code of the script."""
    import random
    import runpy

    from anybatch.doctor.recording import Watch, begin_watching, end_watching

    signal.alarm(MOST_SECONDS)
    out = os.open(path.with_suffix(".out"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    warnings.simplefilter("ignore")
    random.seed(0)
    sys.argv, sys.path = [str(path)], [str(path.parent), *sys.path]
    log = begin_watching(Watch(folder=str(path.with_suffix(""))))
    code = 1
    try:
        with suppress(SystemExit):
            runpy.run_path(str(path), run_name="__main__")
        code = 0
    except BaseException:
        traceback.print_exc()
    end_watching(log, "error" if code else "")
    sys.stdout.flush()
    sys.stderr.flush()
    return code

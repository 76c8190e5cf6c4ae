"""The server of forks: Python's own, with torch and anybatch loaded; each worker of pytest starts one when it needs it."""

import multiprocessing
import os
from functools import cache
from multiprocessing.context import ForkServerContext
from pathlib import Path

ROOT = Path(__file__).parents[2]
ALONE = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "99"}

"""One thread each: there are more processes than cores. Kineto else writes about itself."""


@cache
def server() -> ForkServerContext:
    """Processes of this context start in milliseconds: they do not load torch, they have it."""
    os.environ.update(ALONE)
    paths = [str(ROOT / "src"), str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path for path in paths if path))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.processes.loaded"])
    return context

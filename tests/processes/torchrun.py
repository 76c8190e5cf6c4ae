"""torchrun's own agent, here, and its ranks, forked: cold, each of them would take 2 to 5 s of a core to load torch."""

import runpy
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tests.processes.server import server


def launched(action: Callable[..., Any], *arguments: Any, name: str, ranks: int = 2, restarts: int = 0) -> Future[Any]:
    """`action` of a module on each rank, started again after a failure so often; the result raises what one rank raised."""
    server()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        max_restarts=restarts,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id=name,
        start_method="forkserver",
    )
    return ThreadPoolExecutor(1).submit(elastic_launch(config, action), *arguments)


def script(path: Path, said: Path) -> None:
    """A script, as `torchrun` starts it; what all ranks print is added to `said`."""
    with said.open("a") as lines, redirect_stdout(lines):
        runpy.run_path(str(path), run_name="__main__")

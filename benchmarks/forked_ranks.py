"""Runs of the command line as forked processes: one, or as many ranks as one asks for, with no launcher between."""

import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler writes about itself
PRELOADED = (
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "anybatch.app.cli.train",
    "anybatch.app.report",
    "anybatch.app.training.loop",
    "anybatch.app.training.tasks.digits",
)
Fault = Callable[[int], None]
"""What goes wrong on a rank: called with its number before the command line is."""


def preload() -> None:
    """Load all that a run needs, so that a fork has it and most kills hit the training, not its start."""
    for module in PRELOADED:
        __import__(module)
    import torch

    from anybatch.app.training.tasks import stdlib

    torch.set_num_threads(1)
    stdlib.functions()  # parsed once, not in each process


@dataclass(frozen=True)
class Running:
    """The processes of one start, by rank."""

    pids: tuple[int, ...]
    log: Path

    def alive(self) -> list[int]:
        return [pid for pid in self.pids if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None]

    def kill(self, rank: int) -> None:
        os.kill(self.pids[rank], signal.SIGKILL)

    def wait(self, seconds: float = 600.0) -> list[int]:
        """The exit code of each; what still runs after `seconds` is killed, as a launcher would."""
        end = time.monotonic() + seconds
        while self.alive() and time.monotonic() < end:
            time.sleep(0.002)
        for pid in self.alive():
            os.kill(pid, signal.SIGKILL)
        return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self.pids]


def start(
    arguments: list[str], *, ranks: int = 1, log: Path, fault: Fault | None = None, disk: int | None = None
) -> Running:
    """The command line on so many ranks, or alone; no file may grow beyond `disk` bytes."""
    variables = _launch(ranks) if ranks > 1 else {}
    return Running(tuple(_forked(arguments, rank, variables, log, fault, disk) for rank in range(ranks)), log)


_stores: list[object] = []


def _launch(ranks: int) -> dict[str, str]:
    """What torchrun would tell its ranks; the store is ours, on a port that the system chose."""
    from torch.distributed import TCPStore

    _stores[:] = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_stores[0].port), "WORLD_SIZE": str(ranks)}  # type: ignore[attr-defined]
    return variables | {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "forked"}


def _forked(
    arguments: list[str], rank: int, variables: dict[str, str], log: Path, fault: Fault | None, disk: int | None
) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        if variables:
            os.environ.update(variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        if disk is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (disk, resource.RLIM_INFINITY))
        if fault is not None:
            fault(rank)
        from anybatch.app.cli.main import run

        code = run(arguments)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    finally:
        sys.stdout.flush()
        os._exit(code)

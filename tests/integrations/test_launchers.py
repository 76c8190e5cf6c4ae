"""Two ranks that torchrun's agents start, as on two machines, or `accelerate launch`, learn what one process does."""

import os
import socket
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from tests.processes.forked import main_module, started

SCRIPT = str(Path(__file__).parent / "launched.py")
TORCHRUN = ["torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=static"]
ACCELERATE = ["accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1"]
"""`--cpu` would start one process, whatever their number."""


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return int(free.getsockname()[1])


def agents_of(launcher: str) -> list[list[str]]:
    port = free_port()
    if launcher == "accelerate":
        return [[*ACCELERATE, f"--main_process_port={port}", "--mixed_precision=no", "--dynamo_backend=no"]]
    meeting = [f"--master-port={port}", "--master-addr=localhost"]
    return [[*TORCHRUN, *meeting, f"--node-rank={node}"] for node in (0, 1)]


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_two_processes_learn_what_one_does(launcher: str, tmp_path: Path):
    names = {"torchrun": ["by_update"], "accelerate": ["by_accelerate", "by_trainer"]}[launcher]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    with ExitStack() as running:
        agents = [
            running.enter_context(
                started(main_module, module, [*options, SCRIPT, str(tmp_path), *names], env=environment)
            )
            for module, *options in agents_of(launcher)
        ]
        said = [agent.wait() for agent in agents]
    assert [agent.returncode for agent in said] == [0] * len(agents), said
    for rank in (0, 1):
        told = torch.load(tmp_path / f"{rank}.pt")
        assert told.pop("ranks") == 2
        assert list(told) == names
        assert max(told.values()) <= 1e-6

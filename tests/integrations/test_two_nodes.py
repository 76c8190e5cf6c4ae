"""torchrun with two agents on one machine, as on two."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

SCRIPT = Path(__file__).parent / "two_nodes.py"


def test_two_nodes_learn_what_one_process_does(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    common = [
        "--nnodes=2",
        "--nproc-per-node=1",
        "--rdzv-backend=static",
        f"--master-port={port}",
        "--master-addr=localhost",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    agents = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *common, f"--node-rank={node}", str(SCRIPT), str(tmp_path)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in (0, 1)
    ]
    told = [agent.communicate()[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], told
    torch.manual_seed(0)
    x, y = torch.randn(33, 6), torch.randint(0, 3, (33,))
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for start in (0, 12, 24):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[start : start + 12]), y[start : start + 12]).backward()
        optimizer.step()
    for rank in (0, 1):
        for found, wanted in zip(torch.load(tmp_path / f"{rank}.pt"), model.parameters(), strict=True):
            torch.testing.assert_close(found, wanted.detach(), rtol=1e-6, atol=1e-7)

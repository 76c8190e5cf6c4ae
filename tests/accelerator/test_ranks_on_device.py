"""Two ranks, each with a device: DDP and FSDP2, with collectives that go through the host."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from anybatch import Update
from tests.accelerator.on_device import on_two_devices
from tests.accelerator.plugged import counted, plug
from tests.accelerator.setups import ROWS, batch, contrastive, cross_entropy, mlp
from tests.accelerator.through_host import group_of_devices

OWN = ([0, 19], [19, ROWS])
"""The rows of each rank: not equally many."""


def spread(model: nn.Module, engine: str) -> nn.Module:
    group = group_of_devices()
    there = model.to(plug())
    if engine == "ddp":
        return DistributedDataParallel(there, process_group=group)
    mesh = DeviceMesh.from_group(group, "pretend", mesh_dim_names=("ranks",))
    fully_shard(there, mesh=mesh)
    return there


def whole(parameter: nn.Parameter) -> torch.Tensor:
    """All of it; the parts of a sharded one are gathered on the host, because torch's own way needs a backend in C++."""
    if not hasattr(parameter, "to_local"):
        return parameter.detach().cpu().double()
    parts: list[torch.Tensor] = [torch.empty(0)] * dist.get_world_size()
    dist.all_gather_object(parts, parameter.to_local().detach().cpu().double())
    return torch.cat(parts)


def whole_batch(objective: object) -> list[torch.Tensor]:
    """The weights after two steps on all rows at once, in float64, by plain torch."""
    model = mlp().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, targets = batch()
    for _ in range(2):
        optimizer.zero_grad()
        rows = inputs.double(), targets
        if hasattr(objective, "encode"):
            objective.loss(objective.encode(model, rows)).backward()
        else:
            nn.functional.cross_entropy(model(rows[0]), rows[1]).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("objective", [cross_entropy, contrastive])
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
@on_two_devices
def test_the_weights_are_those_of_the_whole_batch(engine, objective):
    first, last = OWN[dist.get_rank()]
    own = tuple(column[first:last] for column in batch())
    model = spread(mlp(), engine)
    update = Update(
        model, torch.optim.SGD(model.parameters(), lr=0.1), objective(), micro_batch=8, check="off", clip_norm=1e6
    )
    for _ in range(2):
        result = update(own)
    assert result.applied
    for parameter, expected in zip(model.parameters(), whole_batch(objective()), strict=True):
        assert torch.allclose(whole(parameter), expected, atol=1e-6)


@on_two_devices
def test_gradients_cross_to_the_host_once_per_update_and_not_once_per_micro_batch():
    first, last = OWN[dist.get_rank()]
    own = tuple(column[first:last] for column in batch())
    model = spread(mlp(), "ddp")
    update = Update(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        cross_entropy(),
        micro_batch=4,
        check="off",
        on_nonfinite="ignore",
    )
    update(own)
    update(own)
    before = counted()
    update(own)
    seen = counted() - before
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert weights <= seen.bytes_to_host <= weights + 400, "what the ranks tell each other is a few numbers"

"""What the tests on ranks share: small models and data, ways to wrap them for ranks, and gradients brought together again."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from anybatch import Objective, PerRow, Sum
from anybatch.core import take_rows

LABELS = 3
Wrap = Callable[[nn.Module], nn.Module]


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def ddp_views(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def fsdp(model: nn.Module) -> nn.Module:
    """Every linear layer a unit of its own, and the rest."""
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(model)


def fsdp_units(model: nn.Module) -> nn.Module:
    """Every child with parameters a unit of its own; one may hold BatchNorms inside, or be one."""
    for child in model.children():
        if any(True for _ in child.parameters()):
            fully_shard(child)
    return fully_shard(model)


def ddp_sync_norm(model: nn.Module) -> nn.Module:
    """Converted when it is wrapped: on the CPU DDP takes no SyncBatchNorm."""
    wrapped = DistributedDataParallel(model)
    wrapped.module = nn.SyncBatchNorm.convert_sync_batchnorm(wrapped.module)
    return wrapped


def hsdp(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("replicate", "shard"))
    return fully_shard(model, mesh=mesh)


BOTH = pytest.mark.parametrize("wrap", [ddp, fsdp], ids=["ddp", "fsdp"])


def cases(*found: tuple[Any, ...]) -> Any:
    """(number of ranks, scenario, its arguments...): one test each."""
    given = [(size, scenario, arguments) for size, scenario, *arguments in found]
    names = ["-".join(getattr(part, "__name__", str(part)) for part in case) for case in found]
    return pytest.mark.parametrize(("size", "scenario", "arguments"), given, ids=names)


def largest(told: list[Any], key: str) -> float:
    """The largest over ranks."""
    return max(abs(float(rank[key])) for rank in told)


def near_equal(count: int) -> list[int]:
    """40 rows over 3 ranks are 14, 13, 13."""
    size = dist.get_world_size()
    return [count // size + (rank < count % size) for rank in range(size)]


def own(batch: Any, counts: list[int]) -> Any:
    """This rank's rows of the whole batch."""
    start = sum(counts[: dist.get_rank()])
    return take_rows(batch, list(range(start, start + counts[dist.get_rank()])))


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, LABELS)).to(dtype)


def labelled(count: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    return torch.randn(count, 6), torch.randint(0, LABELS, (count,))


def ragged(count: int, length: int = 7) -> tuple[Tensor, Tensor]:
    """Rows of 7 positions of which the early rows count many and the late ones few."""
    torch.manual_seed(3)
    targets = torch.randint(0, LABELS, (count, length))
    for row in range(count):
        targets[row, max(1, length - row * length // count) :] = -100
    return torch.randn(count, length, 6), targets


def tokens(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=-100)


def num_targets(batch: Any) -> Tensor:
    return (batch[1] != -100).sum()


TOKENS = Objective(tokens, num_targets)


def error(model: nn.Module, reference: Tensor) -> float:
    return float((whole(model) - reference).norm() / reference.norm())


def whole(model: nn.Module) -> Tensor:
    """All gradients in one vector, sharded ones gathered."""
    grads = []
    for parameter in model.parameters():
        grad = parameter.grad
        if grad is not None and hasattr(grad, "full_tensor"):
            grad = grad.full_tensor()
        grads.append(torch.zeros(parameter.shape) if grad is None else grad)
    return torch.cat([grad.detach().to_dense().double().flatten() for grad in grads])


def gathered(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def difference(model: nn.Module, alone: nn.Module) -> float:
    """Of the weights, relative."""
    got = torch.cat([gathered(parameter).flatten() for parameter in model.parameters()])
    wanted = torch.cat([parameter.detach().flatten() for parameter in alone.parameters()])
    return float((got - wanted).norm() / wanted.norm())


class Towers(nn.Module):
    """Queries, keys and a learned scale; the number of forwards of a micro-batch is two."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Dropout(0.0), nn.Linear(12, 8))
        self.scale = nn.Parameter(torch.tensor([6.0]))  # fully_shard takes no 0-dim parameter

    def forward(self, pair: Any) -> Any:
        return self.encoder(pair[0]), self.encoder(pair[1]), self.scale[0]


class ScaledInfoNCE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))

    def forward(self, representations: Any) -> Any:
        queries, keys, scale = representations
        logits = F.normalize(queries, dim=1) @ F.normalize(keys, dim=1).T * scale
        own = torch.arange(len(logits))
        rows = F.cross_entropy(logits + self.bias * torch.eye(len(logits)), own, reduction="none")
        return rows.mean(), {"rows": PerRow(rows), "seen": Sum(len(rows))}


def pairs(count: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(4)
    first = torch.randn(count, 6, dtype=torch.float64)
    return first, first + 0.3 * torch.randn(count, 6, dtype=torch.float64)


def convolutional(*, bias: bool = True) -> nn.Module:
    """A bias before a BatchNorm has the gradient 0, of which AdamW would make steps of rounding errors."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv1d(2, 4, 3, bias=bias),
        nn.BatchNorm1d(4),
        nn.ReLU(),
        Residual(4, bias=bias),
        nn.Flatten(),
        nn.Linear(16, LABELS),
    ).double()


class Residual(nn.Module):
    """Two branches, each with a BatchNorm: their order in backward is the engine's choice."""

    def __init__(self, width: int, *, bias: bool) -> None:
        super().__init__()
        self.main = nn.Sequential(nn.Conv1d(width, width, 1, bias=bias), nn.BatchNorm1d(width))
        self.side = nn.Sequential(nn.Conv1d(width, width, 1, bias=bias), nn.BatchNorm1d(width))

    def forward(self, inputs: Tensor) -> Tensor:
        return (self.main(inputs) + self.side(inputs)).tanh()


def signals(count: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(6)
    rows = torch.randn(count, 2, 6, dtype=torch.float64)
    rows[count // 2 :] += 2.0
    return rows, torch.randint(0, LABELS, (count,))


def norms_of(model: nn.Module) -> Tensor:
    buffers = [buffer for name, buffer in model.named_buffers() if "running" in name]
    return torch.cat([buffer.flatten() for buffer in buffers])

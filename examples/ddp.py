"""DDP on two processes: torchrun --nproc-per-node 2 examples/ddp.py

The rare class weighs 5 times as much, so the mean loss divides by the sum of the weights. The usual loop averages over
micro-batches and ranks as if these sums were equal. DistributedSampler repeats a row, so that both ranks get equally many.
And every backward waits for the other rank. anybatch divides once by the weights of all rows of both ranks, gives each row to
one rank, and synchronizes gradients once per batch.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from anybatch import GlobalBatches, Update, supervised

BATCH, MICRO_BATCH = 64, 16  # rows of both ranks together; rows of one pass
inputs, targets = (torch.tensor(column) for column in load_breast_cancer(return_X_y=True))
inputs = ((inputs - inputs.mean(0)) / inputs.std(0)).float()
data = TensorDataset(inputs, targets.long())
criterion = nn.CrossEntropyLoss(weight=torch.tensor([5.0, 1.0]))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 16), nn.ReLU(), nn.Linear(16, 2))


def train_usual(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    model, num_rows = DistributedDataParallel(model), 0
    accumulate = BATCH // MICRO_BATCH // dist.get_world_size()
    loader = DataLoader(data, MICRO_BATCH, sampler=DistributedSampler(data, shuffle=False))
    for number, (rows, labels) in enumerate(loader, 1):
        (criterion(model(rows), labels) / accumulate).backward()
        num_rows += len(rows)
        if number % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return num_rows


def train_anybatch(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    model, num_rows = DistributedDataParallel(model), 0
    update = Update(model, optimizer, supervised(criterion), micro_batch=MICRO_BATCH)
    for dealt in GlobalBatches(data, BATCH, shuffle=False).loader():
        update(dealt)
        num_rows += len(dealt.row_numbers)
    return num_rows


def run(train: Callable[[nn.Module, torch.optim.Optimizer], int]) -> tuple[Tensor, int]:
    """Train for an epoch; return the gradient of the first step, and the number of rows that all ranks ran."""
    model, gradients = make_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: gradients.append(flat_gradient(model)))
    num_rows = torch.tensor(train(model, optimizer))
    dist.all_reduce(num_rows)
    return gradients[0], int(num_rows)


def flat_gradient(model: nn.Module) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


if __name__ == "__main__":
    dist.init_process_group("gloo")
    reference = make_model()
    criterion(reference(inputs[:BATCH]), targets[:BATCH]).backward()  # the first batch in one pass, in one process
    expected = flat_gradient(reference)
    for name, train in {"usual loop": train_usual, "anybatch": train_anybatch}.items():
        gradient, num_rows = run(train)
        error = (gradient - expected).norm() / expected.norm()
        if dist.get_rank() == 0:
            print(f"{name:10}  gradient off by {error:.0e}  ran {num_rows} rows of {len(data)}")
    dist.destroy_process_group()

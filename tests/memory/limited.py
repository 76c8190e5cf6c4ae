"""Ten updates under a limit of the system, and the same without: run by test_real_limit.py in a process of its own."""

import json
import resource
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anybatch import Cost, Coupled, Objective, Rows, Tokens, Update, info_nce, measure_peak, supervised
from anybatch.memory.meter import bytes_of, standing_tensors

WIDTH = 128
LENGTH = 64


@dataclass(frozen=True)
class Case:
    """Few weights and large activations: most of what an update takes grows with its micro-batch."""

    model: Callable[[], nn.Module]
    objective: Any
    batch: Callable[[], Any]
    split: Callable[[], Any]
    options: dict[str, Any] = field(default_factory=dict)


def mlp() -> nn.Module:
    width = 32 * WIDTH
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 4), nn.Tanh(), nn.Linear(4, 4))


def normed() -> nn.Module:
    """Many layers, so that one layer of the whole batch, which `exact` has to hold, is little of it."""
    width = 32
    # a bias before BatchNorm has gradient 0, of which AdamW would make whole steps of rounding errors
    blocks = [(nn.Linear(width, width, bias=False), nn.BatchNorm1d(width), nn.Tanh()) for _ in range(8)]
    first = nn.Linear(4, width, bias=False)
    return nn.Sequential(first, *(layer for block in blocks for layer in block), nn.Linear(width, 4))


def classified(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 4), torch.randint(0, 4, (rows,))


def bag() -> nn.Module:
    return nn.Sequential(nn.Embedding(50, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))


def bag_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    mask = batch["attention_mask"].unsqueeze(-1)
    return nn.functional.cross_entropy((model(batch["input_ids"]) * mask).sum(1) / mask.sum(1), batch["labels"])


def ragged(rows: int) -> dict[str, Tensor]:
    lengths = torch.randint(2, LENGTH + 1, (rows,))
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    return {
        "input_ids": torch.randint(0, 50, mask.shape),
        "attention_mask": mask,
        "labels": torch.randint(0, 4, (rows,)),
    }


def pairs() -> Coupled:
    return Coupled(lambda model, pair: (model(pair[0]), model(pair[1])), info_nce(temperature=0.5))


CASES = {
    "rows": Case(mlp, supervised(nn.CrossEntropyLoss()), lambda: classified(512), lambda: Rows(512)),
    "tokens": Case(
        bag,
        Objective(bag_loss),
        lambda: ragged(256),
        lambda: Tokens(256 * LENGTH, cost=Cost(fixed=1e9), slack=0),
    ),
    "coupled": Case(mlp, pairs(), lambda: (torch.randn(256, 4), torch.randn(256, 4)), lambda: Rows(256)),
    "exact": Case(
        normed,
        supervised(nn.CrossEntropyLoss()),
        lambda: classified(8192),
        lambda: Rows(8192),
        {"batch_norm": "exact"},
    ),
}


def taken() -> int:
    """What counts against the limit: the data segment of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))


def start(case: Case, split: Any) -> tuple[Update, list[Any]]:
    torch.manual_seed(0)
    model = case.model()
    batches = [case.batch() for _ in range(2)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
    return Update(model, optimizer, case.objective, micro_batch=split, **case.options), batches


def need(case: Case) -> int:
    """What an update of the given split takes beside weights, optimizer and batch, by the meter."""
    update, batches = start(case, case.split())
    update(batches[0])
    standing = bytes_of(standing_tensors(update))
    _, peak = measure_peak(update, batches[1])
    return peak - standing


def train(case: Case, splits: list[Any], *, room: int | None = None) -> tuple[Tensor, list[int], list[Any]]:
    """The weights after ten updates, what each had to retry, and the split that each ended with; one to begin each with."""
    update, batches = start(case, splits[0])
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if room is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (taken() + room, hard))
    retries, ended = [], []
    for number in range(10):
        update.accumulator.split = splits[number] if number < len(splits) else update.accumulator.split
        retries.append(update(batches[number % 2]).retries)
        ended.append(update.accumulator.split)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    weights = torch.cat([tensor.detach().double().flatten() for tensor in update.model.state_dict().values()])
    return weights, retries, ended


def main() -> None:
    torch.set_num_threads(1)
    threading.stack_size(2**19)  # the stacks of lockstep count against the limit, and would outweigh the activations
    torch.set_default_dtype(torch.float64)
    case = CASES[sys.argv[1]]
    full = need(case)
    at_once, never, _ = train(case, [case.split()])  # also the warm-up: all threads and kernels are there afterwards
    assert not any(never)
    limited, retries, ended = train(case, [case.split()], room=full // 2)
    again, _, _ = train(case, ended)
    print(
        json.dumps(
            {
                "need": full,
                "retries": retries,
                "split": repr(ended[-1]),
                "difference": float((limited - at_once).norm() / at_once.norm()),
                "difference_to_settled": float((limited - again).abs().max()),
            }
        )
    )


if __name__ == "__main__":
    main()

"""Ten updates under a limit of the system, and the same without: run by test_real_limit.py in a process of its own."""

import json
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anybatch import Cost, Coupled, Objective, Rows, Tokens, Update, info_nce, supervised

WIDTH = 1024
LENGTH = 64


@dataclass(frozen=True)
class Case:
    model: Callable[[], nn.Module]
    objective: Any
    batch: Callable[[], Any]
    split: Callable[[], Any]
    room: int
    """MiB for the update, with its optimizer's state: the given split does not fit into it."""


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(32, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, 4))


def classified(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 32), torch.randint(0, 4, (rows,))


def bag() -> nn.Module:
    return nn.Sequential(nn.Embedding(50, WIDTH // 4), nn.Tanh(), nn.Linear(WIDTH // 4, 4))


def bag_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    mask = batch["attention_mask"].unsqueeze(-1)
    return nn.functional.cross_entropy((model(batch["input_ids"]) * mask).sum(1) / mask.sum(1), batch["labels"])


def ragged() -> dict[str, Tensor]:
    rows = 512
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
    "rows": Case(mlp, supervised(nn.CrossEntropyLoss()), lambda: classified(4096), lambda: Rows(4096), 16),
    "tokens": Case(
        bag,
        Objective(bag_loss),
        ragged,
        lambda: Tokens(65536, cost=Cost(fixed=1e9), slack=0),
        24,
    ),
    "coupled": Case(mlp, pairs(), lambda: (torch.randn(1024, 32), torch.randn(1024, 32)), lambda: Rows(1024), 14),
}


def taken() -> int:
    """What counts against the limit: the data segment of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))


def train(case: Case, splits: list[Any], *, room: int | None = None) -> tuple[Tensor, list[int], list[Any]]:
    """The weights after ten updates, what each had to retry, and the split that each ended with; one to begin each with."""
    torch.manual_seed(0)
    model = case.model()
    batches = [case.batch() for _ in range(2)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
    update = Update(model, optimizer, case.objective, micro_batch=splits[0])
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if room is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (taken() + room * 2**20, hard))
    retries, ended = [], []
    for number in range(10):
        update.accumulator.split = splits[number] if number < len(splits) else update.accumulator.split
        retries.append(update(batches[number % 2]).retries)
        ended.append(update.accumulator.split)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    weights = torch.cat([tensor.detach().double().flatten() for tensor in model.state_dict().values()])
    return weights, retries, ended


def main() -> None:
    torch.set_num_threads(1)
    case = CASES[sys.argv[1]]
    at_once, never, _ = train(case, [case.split()])  # also the warm-up: all threads and kernels are there afterwards
    assert not any(never)
    limited, retries, ended = train(case, [case.split()], room=case.room)
    again, _, _ = train(case, ended)
    print(
        json.dumps(
            {
                "retries": retries,
                "split": repr(ended[-1]),
                "difference": float((limited - at_once).norm() / at_once.norm()),
                "difference_to_settled": float((limited - again).abs().max()),
            }
        )
    )


if __name__ == "__main__":
    main()

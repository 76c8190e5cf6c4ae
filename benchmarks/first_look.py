"""What the look at the first batch costs: the first update with it, as a ratio to the first update without.

    python -m benchmarks.first_look

Every update is the first of a new `Update`, the two kinds in turn, in one process and one thread: medians of processor
times.
"""

import copy
import statistics
from time import process_time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch import Objective, Update
from benchmarks.models import SmallTransformer


def first_update(model: nn.Module, objective: Objective, batch: Any, micro_batch: int, check: str) -> float:
    """Seconds of the processor that the first update of a copy takes."""
    twin = copy.deepcopy(model)
    update = Update(twin, torch.optim.AdamW(twin.parameters()), objective, micro_batch=micro_batch, check=check)
    started = process_time()
    update(batch)
    return process_time() - started


def token_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def row_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows, length = 64, 64
    words = torch.randint(0, 256, (rows, length))
    works = {
        "MLP 64-256-256-10, 64 rows by 16": (
            nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)),
            Objective(row_loss),
            (torch.randn(rows, 64), torch.randint(0, 10, (rows,))),
        ),
        "the same with dropout": (
            nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 256), nn.Linear(256, 10)),
            Objective(row_loss),
            (torch.randn(rows, 64), torch.randint(0, 10, (rows,))),
        ),
        "small transformer, 64 rows of 64 by 16": (SmallTransformer(), Objective(token_loss), (words, words)),
    }
    for name, (model, objective, batch) in works.items():
        times: dict[str, list[float]] = {"first": [], "off": []}
        for _ in range(9):
            for check, found in times.items():
                found.append(first_update(model, objective, batch, 16, check))
        with_look, without = (statistics.median(found[1:]) for found in times.values())
        print(f"{name}: {without * 1e3:.1f} ms without, {with_look * 1e3:.1f} ms with: {with_look / without:.2f}x")


if __name__ == "__main__":
    main()

"""What is looked at before the first batch, every malloc counted: run by test_check_memory.py in a process of its own."""

import gc
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from anybatch import Fit, Update, plan, supervised
from anybatch.batches import Batch, tensors
from anybatch.memory import bytes_of, drop_gradients, standing_tensors
from anybatch.proof import look_first, self_check
from benchmarks.every_malloc import Counted
from benchmarks.models import SmallTransformer

CLASSES = supervised(nn.CrossEntropyLoss())
FEW, SIZES = 24, (1, 8, 24)
MANY, LIMIT = 12000, 60 * 2**20


def deep(width: int = 256, dtype: torch.dtype = torch.float32) -> nn.Module:
    inner = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(64, width), *inner, nn.Linear(width, 10)).to(dtype)


def vectors(rows: int, dtype: torch.dtype = torch.float32) -> Batch:
    return torch.randn(rows, 64).to(dtype), torch.randint(0, 10, (rows,))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def taken(run: Callable[[Batch], Any], update: Update, batch: Batch, counted: Counted) -> int:
    """What the second run takes, all that was there before included."""
    for _ in range(2):
        drop_gradients(update.parameters())
        gc.collect()
        before = counted.live - bytes_of([*standing_tensors(update), *tensors(batch)])
        counted.restart()
        run(batch)
    return counted.peak - before


def shares(model: nn.Module, batch: Batch, counted: Counted) -> dict[str, list[float]]:
    """By size: the check and the look by the update; what was planned by the larger of update and check."""
    optimizer = sgd(model)
    found: dict[str, list[float]] = {"check": [], "look": [], "planned": []}
    planned = plan(model, optimizer, CLASSES, batch, memory="1GiB", check=True, checkpointing=False, ranking=False)
    gc.freeze()  # what is here by now need not be looked through each time
    for size in SIZES:
        update = Update(model, optimizer, CLASSES, micro_batch=size, check="off")
        own = taken(update, update, batch, counted)
        runs = [partial(one, update.accumulator) for one in (self_check, look_first)]
        check, look = (taken(run, update, batch, counted) for run in runs)
        found["check"].append(check / own)
        found["look"].append(look / own)
        found["planned"].append((planned.whole_bytes if size == FEW else planned.peak(size)) / max(own, check))
    return found


def at_limit(dtype: torch.dtype, counted: Counted) -> dict[str, Any]:
    """The most bytes of a first batch, checked and learnt from, by the limit of `Fit`."""
    fit, batch = Fit(LIMIT), vectors(MANY, dtype)
    for _ in range(2):  # the first time it plans, and torch and its kernels keep what they keep for a process
        model = deep(512, dtype)
        update = Update(model, sgd(model), CLASSES, micro_batch=fit, check=True)
        gc.collect()
        before = counted.live - bytes_of([*standing_tensors(update), *tensors(batch)])
        counted.restart()
        update(batch)
        used = (counted.peak - before) / LIMIT
        assert fit.choice is not None
        found = {"finding": update.guard.finding, "used": used, "size": fit.choice.size}
        del model, update
    return found


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    counted = Counted()
    texts = torch.randint(0, 64, (FEW, 16))
    found = {
        "linear": shares(deep(), vectors(FEW), counted),
        "attention": shares(SmallTransformer(width=64), (texts, texts.roll(-1, 1)), counted),
        "bf16": shares(deep(dtype=torch.bfloat16), vectors(FEW, torch.bfloat16), counted),
        "limits": {str(dtype): at_limit(dtype, counted) for dtype in (torch.float32, torch.bfloat16)},
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()

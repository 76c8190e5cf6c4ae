"""`Fit` at a limit of so many bytes, every malloc counted: run by test_exact_limit.py in a process of its own."""

import gc
import json
from typing import Any

import torch
from torch import nn

from anybatch import Fit, Rows, Update, supervised
from anybatch.core import Batch, tensors
from anybatch.memory import bytes_of, drop_gradients, metered, standing_tensors
from anybatch.verification import check_first_batch
from benchmarks.every_malloc import Counted
from benchmarks.models import SmallTransformer

LIMIT = 30 * 2**20
CLASSES = supervised(nn.CrossEntropyLoss())
GROWING = (6000, 9000, 7400, 12000)


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 2048), nn.Tanh(), nn.Linear(2048, 32), nn.Tanh(), nn.Linear(32, 4))


def convolved() -> nn.Module:
    layers = [nn.Unflatten(1, (1, 32)), nn.Conv1d(1, 64, 3), nn.Tanh(), nn.Conv1d(64, 4, 3)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten())


def batch_of(rows: int) -> Batch:
    return torch.randn(rows, 32), torch.randint(0, 4, (rows,))


def learner(model: nn.Module, split: Any) -> Update:
    return Update(model, torch.optim.AdamW(model.parameters()), CLASSES, micro_batch=split)


def needs(update: Update, batch: Batch, counted: Counted) -> int:
    """What an update takes, all that was there before included."""
    update(batch)
    drop_gradients(update.parameters())
    gc.collect()
    counted.restart()
    before = counted.live - bytes_of([*standing_tensors(update), *tensors(batch)])
    update(batch)
    return counted.peak - before


def fitted(make: Any, counted: Counted) -> dict[str, Any]:
    """Growing batches below the limit; then what some sizes take, and what was predicted."""
    for split, rows in ((Fit(LIMIT, most=4), 400), (Rows(1000), GROWING[-1])):
        needs(
            learner(make(), split), batch_of(rows), counted
        )  # torch and its kernels allocate some memory once per process
    model, fit = make(), Fit(LIMIT)
    update = learner(model, fit)
    gc.collect()
    standing, used, refused = bytes_of(model.parameters()), [], 0
    baseline = counted.live - standing
    with counted.limited(LIMIT - standing):
        for rows in GROWING:
            counted.restart()
            batch = batch_of(rows)
            update(batch)
            used.append((counted.peak - baseline) / LIMIT)
            refused += counted.num_refused
            del batch
            gc.collect()
    chosen, batch = fit.choice.plan, batch_of(GROWING[-1])
    sizes = (50, 500, 1000)  # of 12,000
    off = [chosen.peak(size) / needs(learner(make(), Rows(size)), batch, counted) - 1 for size in sizes]
    return {"method": chosen.method, "refused": refused, "used": used, "off": off}


def metering(counted: Counted) -> float:
    """What a step of many small ops takes at its peak while it is metered, by what it takes alone."""
    deep = nn.Sequential(*(layer for _ in range(200) for layer in (nn.Linear(8, 8), nn.Tanh())))
    rows = torch.randn(1000, 8)
    peaks = []
    for act in (
        lambda: deep(rows).sum().backward(),
        lambda: metered(lambda: deep(rows).sum().backward()),
    ):
        for _ in range(2):
            drop_gradients(deep.parameters())
            gc.collect()
            before = counted.live
            counted.restart()
            act()
        peaks.append(counted.peak - before)
    return peaks[1] / peaks[0]


def looking(counted: Counted) -> list[float]:
    """What the look at the first batch takes, by what the update takes: three models, three sizes of micro-batches."""
    texts = torch.randint(0, 64, (24, 16))
    cases = [(deep(), batch_of(24)), (SmallTransformer(width=64), (texts, texts.roll(-1, 1)))]
    numbers, classes = batch_of(24)
    cases.append((deep().bfloat16(), (numbers.bfloat16(), classes)))
    shares = []
    for model, batch in cases:
        for size in (1, 8, 24):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            update = Update(model, optimizer, CLASSES, micro_batch=size, check="off")
            peaks = []
            for act in (update, lambda rows, accumulator=update.accumulator: check_first_batch(accumulator, rows)):
                for _ in range(2):
                    drop_gradients(update.parameters())
                    gc.collect()
                    before = counted.live - bytes_of([*standing_tensors(update), *tensors(batch)])
                    counted.restart()
                    act(batch)
                peaks.append(counted.peak - before)
            shares.append(peaks[1] / peaks[0])
    return shares


def deep() -> nn.Module:
    inner = [layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.ReLU())]
    return nn.Sequential(nn.Linear(32, 256), *inner, nn.Linear(256, 10))


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    counted = Counted()
    found = {"fake": fitted(linear, counted), "real": fitted(convolved, counted), "metering": metering(counted)}
    print(json.dumps(found | {"looking": looking(counted)}))


if __name__ == "__main__":
    main()

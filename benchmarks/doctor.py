"""What watching costs: processor time of micro-batches of several sizes, with and without the doctor in turns, medians.

python -m benchmarks.doctor
"""

import statistics
import tempfile
import time
from collections.abc import Callable

import torch
from torch import nn

from anybatch.doctor.recording import Watch, begin_watching, end_watching

TURNS, MICRO_BATCHES = 9, 4
SIZES = {"tiny MLP": (8, 32, 16, 50), "wide MLP": (512, 1024, 256, 4), "large MLP": (1024, 2048, 512, 2)}
"""Inputs, hidden units, rows of a micro-batch, and updates that a turn runs."""


def main() -> None:
    """Print a line per size."""
    torch.set_num_threads(1)
    for name, size in SIZES.items():
        learn = learner(*size)
        learn()
        alone, watched = [], []
        for _ in range(TURNS):
            alone.append(seconds(learn, size[-1]))
            watched.append(seconds_watched(*size))
        one, other = statistics.median(alone), statistics.median(watched)
        print(
            f"{name:<10} {1e3 * one:8.2f} ms alone {1e3 * other:8.2f} ms watched  {other / one:5.2f}x, by micro-batch"
        )


def learner(inputs: int, hidden: int, rows: int, updates: int) -> Callable[[], None]:
    """A few updates of a model of this size."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch, targets = torch.randn(rows, inputs), torch.randint(0, 10, (rows,))

    def learn() -> None:
        for _ in range(updates):
            for _ in range(MICRO_BATCHES):
                (nn.functional.cross_entropy(model(batch), targets) / MICRO_BATCHES).backward()
            optimizer.step()
            optimizer.zero_grad()

    return learn


def seconds(learn: Callable[[], None], updates: int) -> float:
    """By micro-batch."""
    began = time.process_time()
    learn()
    return (time.process_time() - began) / updates / MICRO_BATCHES


def seconds_watched(inputs: int, hidden: int, rows: int, updates: int) -> float:
    """The same under watch, after one round that walks the graph for its leaves."""
    with tempfile.TemporaryDirectory() as folder:
        log = begin_watching(Watch(folder=folder, updates=0, short_epochs=0))
        try:
            learn = learner(inputs, hidden, rows, updates)
            learn()
            return seconds(learn, updates)
        finally:
            end_watching(log)


if __name__ == "__main__":
    main()

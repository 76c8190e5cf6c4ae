"""What watching costs: micro-batches of several sizes with and without the doctor, in turns, the median of each.

python -m benchmarks.doctor
"""

import statistics
import tempfile
import time
from collections.abc import Callable

import torch
from torch import nn

from anybatch.doctor.recording import Watch, begin_watching, end_watching

TURNS, UPDATES, MICRO_BATCHES = 7, 5, 4
SIZES = {"tiny MLP": (8, 32, 16), "wide MLP": (512, 1024, 256), "large MLP": (1024, 2048, 512)}
"""Inputs, hidden units and rows of a micro-batch."""


def main() -> None:
    """Print a line per size."""
    torch.set_num_threads(1)
    for name, (inputs, hidden, rows) in SIZES.items():
        learn = learner(inputs, hidden, rows)
        learn()
        alone, watched = [], []
        for _ in range(TURNS):
            alone.append(seconds(learn))
            watched.append(seconds_watched(inputs, hidden, rows))
        one, other = statistics.median(alone), statistics.median(watched)
        print(
            f"{name:<10} {1e3 * one:8.2f} ms alone {1e3 * other:8.2f} ms watched  {other / one:5.2f}x, by micro-batch"
        )


def learner(inputs: int, hidden: int, rows: int) -> Callable[[], None]:
    """A few updates of a model of this size."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch, targets = torch.randn(rows, inputs), torch.randint(0, 10, (rows,))

    def learn() -> None:
        for _ in range(UPDATES):
            for _ in range(MICRO_BATCHES):
                (nn.functional.cross_entropy(model(batch), targets) / MICRO_BATCHES).backward()
            optimizer.step()
            optimizer.zero_grad()

    return learn


def seconds(learn: Callable[[], None]) -> float:
    """By micro-batch."""
    began = time.perf_counter()
    learn()
    return (time.perf_counter() - began) / UPDATES / MICRO_BATCHES


def seconds_watched(inputs: int, hidden: int, rows: int) -> float:
    """The same under watch, after one round that walks the graph for its leaves."""
    with tempfile.TemporaryDirectory() as folder:
        tape, patches = begin_watching(Watch(folder=folder, updates=0, short_epochs=0))
        try:
            learn = learner(inputs, hidden, rows)
            learn()
            return seconds(learn)
        finally:
            end_watching(tape, patches)


if __name__ == "__main__":
    main()

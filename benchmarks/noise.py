"""Does advice hold? Updates to a loss at six batch sizes, the learning rate searched at each, against what the noise predicts.

    python -m benchmarks.noise MODEL OPTIMIZER      one of linear, mlp, text; sgd or adam: a few minutes each
    python -m benchmarks.noise schedule MODEL       a batch that grows against batches that do not, with Adam
    python -m benchmarks.noise cost                 what measuring costs
    python -m benchmarks.noise draw                 the picture, from all that was run

The measured number is that of the fastest learning rate on a grid of factors of 2, as a mean over seeds. The prediction is
`updates = least * (1 + noise / batch)`, with the noise scale that an `Update(noise=1)` saw on its way to the same loss, and
`least` from the measured number at the batch that it ran with: the one thing that a user has.
"""

import json
import math
import platform
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from time import monotonic, process_time
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim import Optimizer

from anybatch import Objective, Rows, Update
from anybatch.noise import WindowNoise, noise_scale_of
from benchmarks.models import SmallTransformer
from benchmarks.noise_pictures import advice_picture
from benchmarks.texts import stdlib_functions

RESULTS = Path(__file__).parent.parent / "docs" / "benchmarks" / "noise.json"
PICTURE = Path(__file__).parent.parent / "docs" / "pictures" / "noise.svg"
BATCHES = (4, 12, 36, 108, 324, 972)
ASKED = 36
"""The batch of the run that measures noise: the one that a user has."""
SEEDS = 2
STOP_AFTER = 200.0
"""Seconds after which no other batch is begun."""
MOST_UPDATES = 12_000
IGNORED = -100
ASCII = 128
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Problem:
    """Something to learn, down to a loss over all rows, or over the first of them."""

    make: Callable[[], nn.Module]
    rows: Batch
    target: float
    first_rates: dict[str, float]
    """Where the search begins, at the smallest batch."""
    num_judged: int | None = None
    """Rows whose loss is looked at; None: all."""

    @property
    def judged(self) -> Batch:
        return self.rows[0][: self.num_judged], self.rows[1][: self.num_judged]

    def batches(self, size: Callable[[int], int], seed: int) -> Iterator[Batch]:
        """Rows in a new order each epoch, in batches of `size(update)`."""
        chance, update, left = torch.Generator().manual_seed(seed), 0, torch.empty(0, dtype=torch.long)
        while True:
            while len(left) < size(update):
                left = torch.cat([left, torch.randperm(len(self.rows[0]), generator=chance)])
            yield self.rows[0][left[: size(update)]], self.rows[1][left[: size(update)]]
            left, update = left[size(update) :], update + 1


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch[0])
    return F.cross_entropy(logits, batch[1], ignore_index=IGNORED)


def units_of(batch: Batch) -> Tensor:
    return (batch[1] != IGNORED).sum()


def digits() -> Batch:
    data = load_digits()
    return torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)


def functions() -> Batch:
    """Beginnings of functions of the standard library, 6 to 17 bytes of each."""
    sources = enumerate(stdlib_functions()[:8192:4])
    texts = [[min(byte, ASCII - 1) for byte in list(source)[: 6 + number * 7 % 12]] for number, source in sources]
    inputs = nn.utils.rnn.pad_sequence([torch.tensor(text[:-1]) for text in texts], batch_first=True)
    targets = [torch.tensor(text[1:]) for text in texts]
    return inputs, nn.utils.rnn.pad_sequence(targets, batch_first=True, padding_value=IGNORED)


class CausalText(nn.Module):
    """One causal layer of width 32 over bytes."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(ASCII, width), nn.Embedding(17, width)
        self.layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(width, ASCII)

    def forward(self, text: Tensor) -> Tensor:
        length = text.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        states = self.layer(self.embed(text) + self.place(torch.arange(length)), src_mask=mask)
        return self.head(states).transpose(1, 2)


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "linear": lambda: Problem(lambda: nn.Linear(64, 10), digits(), 0.15, {"sgd": 0.1, "adam": 2e-3}),
    "mlp": lambda: Problem(
        lambda: nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)),
        digits(),
        0.03,
        {"sgd": 0.1, "adam": 1e-3},
    ),
    "text": lambda: Problem(CausalText, functions(), 0.9, {"sgd": 0.4, "adam": 8e-3}, num_judged=300),
}
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": partial(torch.optim.SGD, momentum=0.0),
    "adam": partial(torch.optim.Adam, betas=(0.9, 0.99)),
}


def updates_needed(
    problem: Problem,
    make: Callable[..., Optimizer],
    lr: Callable[[int], float],
    size: Callable[[int], int],
    seed: int,
    most: int,
) -> float:
    """Updates until the loss is at the target, looked at every 2 % of them; inf after `most`."""
    torch.manual_seed(seed)
    model = problem.make()
    optimizer = make(model.parameters(), lr=lr(0))
    next_look = 1
    for update, batch in enumerate(problem.batches(size, seed), start=1):
        optimizer.param_groups[0]["lr"] = lr(update - 1)
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        if update >= next_look:
            next_look = max(update + 1, int(update * 1.02))
            with torch.no_grad():
                whole = float(loss_of(model, problem.judged))
            if whole <= problem.target:
                return update
            if not math.isfinite(whole):
                return math.inf
        if update >= most:
            return math.inf
    raise AssertionError("batches do not end")


def mean_needed(problem: Problem, make: Callable[..., Optimizer], lr: float, batch: int, best: float) -> float:
    """The geometric mean over seeds; inf as soon as it cannot be better than twice `best`."""
    found = []
    for seed in range(SEEDS):
        most = int(min(MOST_UPDATES, 2 * best))
        found.append(updates_needed(problem, make, lambda _: lr, lambda _: batch, seed, most))
        if found[-1] == math.inf:
            return math.inf
    return math.exp(statistics.fmean(map(math.log, found)))


def search(key: str, problem: Problem, make: Callable[..., Optimizer], batch: int, start: float) -> tuple[float, float]:
    """The fewest updates, and the learning rate that needs them: up the grid, then down, until two are worse in a row.

    Each that was tried is kept, so that a search that was stopped goes on.
    """
    place = f"tried: {key}, batch {batch} from {start:.6g}"
    tried = {int(step): math.inf if number is None else number for step, number in kept().get(place, {}).items()}

    def attempt(step: int, best: float) -> None:
        if step not in tried:
            tried[step] = mean_needed(problem, make, start * 2.0**step, batch, best)
            keep(place, {each: None if number == math.inf else number for each, number in tried.items()})

    attempt(0, math.inf)
    for way in (1, -1):
        step, worse = way, 0
        while worse < 2:
            best = min(number for each, number in tried.items() if each * way < abs(step))
            attempt(step, best)
            worse = 0 if tried[step] < best else worse + 1
            step += way
    step = min(tried, key=tried.__getitem__)
    return tried[step], start * 2.0**step


def noise_seen(problem: Problem, make: Callable[..., Optimizer], lr: float, batch: int, updates: int) -> dict[str, Any]:
    """The noise scale on the way to the target, in ten stretches, as `Update(noise=1)` measures it."""
    torch.manual_seed(0)
    model = problem.make()
    update = Update(
        model,
        make(model.parameters(), lr=lr),
        Objective(loss_of, units_of),
        micro_batch=Rows(max(batch // 9, 1)),
        noise=1,
    )
    windows: list[WindowNoise] = []
    stream = problem.batches(lambda _: batch, 0)
    for _ in range(updates):
        update(next(stream))
        windows.append(update.noise.windows[-1])
    size = max(len(windows) // 10, 5)
    stretches = [
        noise_scale_of(windows[start : start + size]).rows for start in range(0, len(windows) - size + 1, size)
    ]
    return {"stretches": stretches, "noise": statistics.median(stretches)}


def run(name: str, optimizer: str) -> None:
    """All six batches, each kept when it is found: a run that was stopped goes on after the last."""
    problem, make, key = PROBLEMS[name](), OPTIMIZERS[optimizer], f"{name}, {optimizer}"
    found: dict[int, Any] = {int(size): one for size, one in kept().get(key, {"batches": {}})["batches"].items()}
    start, began = problem.first_rates[optimizer], monotonic()
    for batch in BATCHES:
        if batch not in found:
            if monotonic() - began > STOP_AFTER:
                return print("to be continued: run this again")
            updates, lr = search(key, problem, make, batch, start)
            found[batch] = {"updates": updates, "lr": lr}
            keep(key, {"batches": found})
            print(f"{key}, batch {batch}: {updates:.0f} updates at lr {lr:.4g}", flush=True)
        start = found[batch]["lr"]
    asked = found[ASKED]
    seen = noise_seen(problem, make, asked["lr"], ASKED, int(asked["updates"]))
    fit = fitted(BATCHES, [found[batch]["updates"] for batch in BATCHES])
    print(f"{key}: noise scale {seen['noise']:.1f}, fitted to the runs {fit:.1f}", flush=True)
    keep(key, {"target": problem.target, "asked": ASKED, "batches": found, "fitted": fit, **seen})
    return None


def fitted(batches: Sequence[int], updates: Sequence[float]) -> float:
    """The noise scale whose curve comes nearest, by least squares of logarithms, over a grid."""

    def error(scale: float) -> float:
        logs = [math.log(number / (1 + scale / batch)) for batch, number in zip(batches, updates, strict=True)]
        return statistics.pvariance(logs)

    return min((2.0 ** (step / 20) for step in range(-40, 281)), key=error)


def kept() -> dict[str, Any]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def keep(key: str, value: Any) -> None:
    held = kept() | {
        key: value,
        "machine": f"{platform.machine()}, 1 thread",
        "torch": torch.__version__,
        "date": str(date.today()),
    }
    RESULTS.write_text(json.dumps(held, indent=1) + "\n")


def main() -> None:
    torch.set_num_threads(1)
    words = sys.argv[1:]
    if words == ["draw"]:
        PICTURE.write_text(advice_picture(kept()))
    elif words == ["cost"]:
        keep("cost", cost())
    elif words[:1] == ["schedule"]:
        keep(f"schedule {words[1]}", growing(words[1]))
    else:
        run(words[0], words[1])


def cost(rounds: int = 12) -> dict[str, Any]:
    """Processor time of updates, measured one in 8 and not at all, in turn: what measuring costs."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 256, (32, 64))
    batch = (tokens, tokens.roll(-1, 1))
    updates = {}
    for noise in (None, 8):
        torch.manual_seed(0)
        model = SmallTransformer()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        updates[noise] = Update(model, optimizer, Objective(loss_of, units_of), micro_batch=4, noise=noise, check="off")
    ratios, seconds = [], {None: 0.0, 8: 0.0}
    for _ in range(rounds):
        took = {}
        for noise, update in updates.items():
            began = process_time()
            for _ in range(8):
                update(batch)
            took[noise] = process_time() - began
            seconds[noise] += took[noise]
        ratios.append(took[8] / took[None])
    one_pass = seconds[None] / rounds / 8 / 8
    print(f"a micro-batch takes {one_pass * 1e3:.1f} ms; one in 8 measured: {statistics.median(ratios):.3f}")
    return {"ratio": statistics.median(ratios), "micro_batch_seconds": one_pass}


FRESH_SEEDS = 6
"""On which the best growing batch, chosen among nine, is compared with the best fixed one: the choice had other seeds."""
FIXED_ROWS = 64
"""What an update costs beside its rows, in rows: where this is small nothing but a small batch pays."""


def growing(name: str) -> dict[str, Any]:
    """Time to the loss, in rows and `FIXED_ROWS` per update: the best fixed batch, and a batch that doubles as noise grows."""
    problem, make = PROBLEMS[name](), OPTIMIZERS["adam"]
    held = kept()[f"{name}, adam"]
    rates = {int(batch): (one["updates"], one["lr"]) for batch, one in held["batches"].items()}
    fixed = {batch: updates * (batch + FIXED_ROWS) for batch, (updates, _) in rates.items()}
    best = min(fixed, key=fixed.__getitem__)
    updates, lr = rates[best]
    shapes = [
        (first, last, factor)
        for first, last in ((best / 3, best), (best / 3, best * 3), (best, best * 3))
        for factor in (0.5, 1.0, 2.0)
    ]

    def rows_needed(first: float, last: float, factor: float, seed: int) -> float:
        """In four steps from `first` to `last` rows over as many updates as the fixed batch needs."""

        def size(update: int) -> int:
            share = min(update / updates, 1.0)
            return max(round(first * (last / first) ** (math.floor(share * 4) / 4)), 1)

        def rate(update: int) -> float:
            return factor * lr * math.sqrt(size(update) / best)  # the rule that Adam's learning rate follows

        needed = updates_needed(problem, make, rate, size, seed, int(4 * updates))
        return math.inf if needed == math.inf else sum(size(one) + FIXED_ROWS for one in range(int(needed)))

    tried = {shape: statistics.fmean(rows_needed(*shape, seed) for seed in range(SEEDS)) for shape in shapes}
    won = min(tried, key=tried.__getitem__)
    fresh = range(SEEDS, SEEDS + FRESH_SEEDS)
    again = {
        "fixed": [rows_needed(best, best, 1.0, seed) for seed in fresh],
        "growing": [rows_needed(*won, seed) for seed in fresh],
    }
    ratio = statistics.fmean(again["growing"]) / statistics.fmean(again["fixed"])
    print(
        f"{name}: fixed batch {best}; growing {won}: {ratio:.2f} of its time on {FRESH_SEEDS} fresh seeds", flush=True
    )
    return {
        "fixed": fixed,
        "best": best,
        "growing": {f"{first:.0f} to {last:.0f}, lr x {factor}": cost for (first, last, factor), cost in tried.items()},
        "won": f"{won[0]:.0f} to {won[1]:.0f}, lr x {won[2]}",
        "fresh_seeds": again,
        "ratio": ratio,
    }


if __name__ == "__main__":
    main()

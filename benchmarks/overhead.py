"""What anybatch costs on top of a hand-written accumulation loop, beside Accelerate and Lightning on the same work.

    python -m benchmarks.overhead [--quick]

Time per batch as a ratio to the hand-written loop, all contenders interleaved in one process, one thread. The hand loop is
the careful one: it weights micro-batches by their rows, so that it is exact for these losses.
"""

import copy
import logging
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import accelerate
import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from anybatch import Accumulator, Update, supervised
from benchmarks.meter import Contender, Timing, interleave
from benchmarks.models import SmallTransformer
from benchmarks.results import is_quick, print_timings, write_results


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A model, a batch and its micro-batch."""

    name: str
    model: nn.Module
    batch: tuple[Tensor, Tensor]
    micro_batch: int
    rounds: int
    repeats: int

    @property
    def micro_batches(self) -> list[tuple[Tensor, Tensor]]:
        inputs, targets = (column.split(self.micro_batch) for column in self.batch)
        return list(zip(inputs, targets, strict=True))


def works(*, share: float) -> list[Work]:
    """Return the works, with this share of the rounds."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 256, (32, 64))
    mlp = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    return [
        Work(
            name="nn.Linear(10, 2), 4 x 16 rows",
            model=nn.Linear(10, 2),
            batch=(torch.randn(64, 10), torch.randint(0, 2, (64,))),
            micro_batch=16,
            rounds=int(200 * share),
            repeats=10,
        ),
        Work(
            name="MLP 1.6 M, 4 x 64 rows",
            model=mlp,
            batch=(torch.randn(256, 512), torch.randint(0, 10, (256,))),
            micro_batch=64,
            rounds=int(60 * share),
            repeats=2,
        ),
        Work(
            name="transformer 4 x 128, 4 x 8 x 64 tokens",
            model=SmallTransformer(),
            batch=(tokens, tokens.roll(-1, 1)),
            micro_batch=8,
            rounds=int(30 * share),
            repeats=1,
        ),
    ]


def hand_loop(work: Work, *, clip_norm: float | None = None) -> Contender:
    model, criterion, size = copy.deepcopy(work.model), nn.CrossEntropyLoss(), work.micro_batch
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs, targets = work.batch

    def run() -> None:
        optimizer.zero_grad()
        total = 0.0
        for start in range(0, len(inputs), size):
            x, y = inputs[start : start + size], targets[start : start + size]
            loss = criterion(model(x), y) * (len(x) / len(inputs))
            loss.backward()
            total += loss.detach()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()

    return run


def with_accumulator(work: Work) -> Contender:
    model = copy.deepcopy(work.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    accumulator = Accumulator(model, supervised(nn.CrossEntropyLoss()), micro_batch=work.micro_batch)

    def run() -> None:
        optimizer.zero_grad()
        accumulator.backward(work.batch)
        optimizer.step()

    return run


def with_update(work: Work, *, clip_norm: float | None = None) -> Contender:
    model = copy.deepcopy(work.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    update = Update(
        model, optimizer, supervised(nn.CrossEntropyLoss()), micro_batch=work.micro_batch, clip_norm=clip_norm
    )

    def run() -> None:
        update(work.batch)

    return run


def with_accelerate(work: Work) -> Contender:
    parts, criterion = work.micro_batches, nn.CrossEntropyLoss()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=len(parts))
    model = copy.deepcopy(work.model)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))

    def run() -> None:
        total = 0.0
        for inputs, targets in parts:
            with accelerator.accumulate(model):
                loss = criterion(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                total += loss.detach()

    return run


class LightningWork(lightning.LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.criterion = model, nn.CrossEntropyLoss()

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        return self.criterion(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=1e-3)


class Clock(lightning.Callback):
    """Seconds from the end of a warm-up batch to the end of the last: without the trainer's own setting up."""

    def __init__(self, warm_up: int) -> None:
        self.warm_up, self.start, self.end, self.seen = warm_up, 0.0, 0.0, 0

    def on_train_batch_end(self, *args: object) -> None:
        self.seen += 1
        self.end = perf_counter()
        if self.seen == self.warm_up:
            self.start = self.end


def with_lightning(work: Work) -> Contender:
    return lightning_fit(work.model, work.micro_batches, 6 * work.repeats)


def lightning_fit(
    model: nn.Module,
    parts: list[tuple[Tensor, Tensor]],
    batches: int,
    options: Callable[[], dict[str, Any]] = dict,
) -> Contender:
    """Seconds per batch of a fit of several, from the end of the first; `options()` are those of a new trainer."""
    module = LightningWork(copy.deepcopy(model))

    def run() -> float:
        clock = Clock(len(parts))
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_epochs=1,
            accumulate_grad_batches=len(parts),
            callbacks=[clock],
            logger=False,
            enable_progress_bar=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            **options(),
        )
        trainer.fit(module, DataLoader(parts * batches, batch_size=None))
        return (clock.end - clock.start) / (batches - 1)

    return run


def compare(work: Work) -> dict[str, Timing]:
    """All contenders on one work; Lightning runs fewer rounds, each a fit of several batches."""
    contenders = {
        "hand-written loop": hand_loop(work),
        "anybatch Accumulator": with_accumulator(work),
        "anybatch Update": with_update(work),
        "Accelerate": with_accelerate(work),
    }
    timings = interleave(contenders, rounds=work.rounds, repeats=work.repeats)
    clipped = {"loop + clip": hand_loop(work, clip_norm=1.0), "anybatch Update, clip": with_update(work, clip_norm=1.0)}
    with_clip = interleave(clipped, rounds=work.rounds, repeats=work.repeats)
    timings["anybatch Update, both clipping"] = with_clip["anybatch Update, clip"]
    hand = hand_loop(work)
    fits = {"loop": lambda: _mean_time(hand, 6 * work.repeats), "Lightning": with_lightning(work)}
    timings["Lightning"] = interleave(fits, rounds=max(5, work.rounds // 10), repeats=1)["Lightning"]
    return timings


def _mean_time(contender: Contender, repeats: int) -> float:
    start = perf_counter()
    for _ in range(repeats):
        contender()
    return (perf_counter() - start) / repeats


def main() -> None:
    share = 0.2 if is_quick(__doc__, "a fifth of the rounds: a minute, and noisier") else 1
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    timings: dict[str, object] = {}
    for work in works(share=share):
        measured = compare(work)
        print_timings(f"{work.name}: time per batch, as a ratio to the hand-written loop", measured)
        timings[work.name] = {name: asdict(timing) for name, timing in measured.items()}
    write_results("overhead", {"timings": timings}, "accelerate", "lightning")


if __name__ == "__main__":
    main()

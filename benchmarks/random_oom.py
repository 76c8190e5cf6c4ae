"""One random out-of-memory in a short training run, a hundred times over: the end must be that of a run without it.

    python -m benchmarks.random_oom --runs 100

Each run draws a model, an optimizer, options and the operation at which memory runs out, from its own seed; every other one
fails in what comes after the last backward pass: unscaling, clipping, the step. Its end, weights, buffers, the optimizer's
state, the loss scale, the learning rate and torch's random state, is compared bit for bit with that of an undisturbed
run that is given each batch cut as this one ended up cutting it. Then memory is another process's for one update in each kind
of split: how many updates until micro-batches have the size again that was asked for.
"""

import argparse
import gc
import os
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler writes about itself

import torch
from torch import Tensor, nn

from anybatch import Coupled, Objective, Tokens, Update, info_nce, row_dropout, supervised
from anybatch.batches import MicroBatches
from tests.injection import OutOfMemoryAt

UPDATES = 5
ROWS = 16
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD": lambda held: torch.optim.SGD(held, lr=0.05, momentum=0.9, weight_decay=0.01),
    "SGD nesterov foreach": lambda held: torch.optim.SGD(held, lr=0.05, momentum=0.9, nesterov=True, foreach=True),
    "Adam": lambda held: torch.optim.Adam(held, lr=0.01, foreach=False),
    "Adam amsgrad foreach": lambda held: torch.optim.Adam(held, lr=0.01, amsgrad=True, foreach=True),
    "AdamW foreach": lambda held: torch.optim.AdamW(held, lr=0.01, foreach=True),
    "AdamW fused": lambda held: torch.optim.AdamW(held, lr=0.01, fused=True),
    "Adafactor": lambda held: torch.optim.Adafactor(held, lr=0.01, weight_decay=0.1),
    "Adafactor foreach": lambda held: torch.optim.Adafactor(held, lr=0.01, foreach=True),
    "RMSprop": lambda held: torch.optim.RMSprop(held, lr=0.01, momentum=0.5, centered=True),
    "RMSprop foreach": lambda held: torch.optim.RMSprop(held, lr=0.01, momentum=0.5, foreach=True),
    "Muon": lambda held: torch.optim.Muon([one for one in held if one.ndim == 2], lr=0.01),
    "Adagrad": lambda held: torch.optim.Adagrad(held, lr=0.01),
    "NAdam foreach": lambda held: torch.optim.NAdam(held, lr=0.01, foreach=True),
    "RAdam": lambda held: torch.optim.RAdam(held, lr=0.01),
    "Adadelta": lambda held: torch.optim.Adadelta(held),
    "Adamax": lambda held: torch.optim.Adamax(held, lr=0.01),
    "Rprop": lambda held: torch.optim.Rprop(held, lr=0.01),
    "ASGD foreach": lambda held: torch.optim.ASGD(held, lr=0.01, foreach=True),
}


def layers(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), *between, nn.Tanh(), nn.Linear(8, 4))


class Bag(nn.Module):
    """The mean of embedded tokens, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 6)
        self.head = layers(nn.Dropout(0.2))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        mask = batch["attention_mask"].unsqueeze(-1).to(self.embed.weight.dtype)
        return self.head((self.embed(batch["input_ids"]) * mask).sum(1) / mask.sum(1))


def rows_batch() -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, 6), torch.randint(0, 4, (ROWS,))


def token_batch() -> dict[str, Tensor]:
    mask = (torch.arange(8) < torch.randint(1, 9, (ROWS, 1))).long()
    mask[0] = 1
    return {
        "input_ids": torch.randint(0, 20, mask.shape),
        "attention_mask": mask,
        "labels": torch.randint(0, 4, (ROWS,)),
    }


def pair_batch() -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, 6), torch.randn(ROWS, 6)


CLASSES = supervised(nn.CrossEntropyLoss())
PAIRS = Coupled(lambda model, pair: (model(pair[0]), model(pair[1])), info_nce(temperature=0.5))
BAGS = Objective(lambda model, batch: nn.functional.cross_entropy(model(batch), batch["labels"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What is trained, and how its batches are cut."""

    model: Callable[[], nn.Module]
    objective: Objective | Coupled = CLASSES
    batch: Callable[[], Any] = rows_batch
    split: Callable[[], Any] = lambda: 8
    batch_norm: str | None = None


KINDS = {
    "rows": Kind(model=layers),
    "dropout": Kind(model=lambda: layers(nn.Dropout(0.3))),
    "dropout by row": Kind(model=lambda: row_dropout(layers(nn.Dropout(0.3)), seed=1)),
    "BatchNorm micro": Kind(model=lambda: layers(nn.BatchNorm1d(8)), batch_norm="micro"),
    "BatchNorm exact": Kind(model=lambda: layers(nn.BatchNorm1d(8), nn.Dropout(0.3)), batch_norm="exact"),
    "Tokens": Kind(model=Bag, objective=BAGS, batch=token_batch, split=lambda: Tokens(32)),
    "Tokens by row": Kind(
        model=lambda: row_dropout(Bag(), seed=1), objective=BAGS, batch=token_batch, split=lambda: Tokens(32)
    ),
    "Coupled": Kind(model=lambda: layers(nn.Dropout(0.3)), objective=PAIRS, batch=pair_batch),
    "auto": Kind(model=layers, split=lambda: "auto"),
    "auto, tokens": Kind(model=Bag, objective=BAGS, batch=token_batch, split=lambda: "auto"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One training run, as drawn."""

    kind: str
    optimizer: str
    clip: dict[str, float]
    has_scaler: bool
    is_bf16: bool
    on_nonfinite: str
    seed: int

    def __str__(self) -> str:
        extras = [f"{name}={value}" for name, value in self.clip.items()]
        extras += ["GradScaler"] if self.has_scaler else []
        extras += ["bf16"] if self.is_bf16 else []
        return ", ".join([self.kind, self.optimizer, *extras, f"on_nonfinite={self.on_nonfinite}"])

    def start(self) -> tuple[Update, list[Any]]:
        """The update before its first batch, and all batches."""
        torch.manual_seed(self.seed)
        kind = KINDS[self.kind]
        batches = [kind.batch() for _ in range(UPDATES)]
        model = kind.model().to(torch.bfloat16 if self.is_bf16 else torch.float32)
        if self.is_bf16 and kind.batch is not token_batch:
            batches = [tuple(one.bfloat16() if one.is_floating_point() else one for one in each) for each in batches]
        optimizer = OPTIMIZERS[self.optimizer](list(model.parameters()))
        update = Update(
            model,
            optimizer,
            kind.objective,
            micro_batch=kind.split(),
            batch_norm=kind.batch_norm,
            **self.clip,
            scaler=torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2) if self.has_scaler else None,
            scheduler=torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, 4),
            on_nonfinite=self.on_nonfinite,
            check="off",
        )
        return update, batches


def drawn(seed: int) -> Setting:
    """The setting of this seed: kinds in turn, all else at random."""
    draw = random.Random(seed)
    kind = list(KINDS)[seed % len(KINDS)]
    optimizer = draw.choice(list(OPTIMIZERS))
    return Setting(
        kind=kind,
        optimizer=optimizer,
        clip=draw.choice([{}, {"clip_norm": 0.1}, {"clip_value": 0.01}]),
        has_scaler=draw.random() < 0.4,
        is_bf16="auto" not in kind and draw.random() < 0.25,
        on_nonfinite=draw.choice(
            ["raise", "skip"] if kind in ("Coupled", "BatchNorm exact") else ["raise", "skip", "drop"]
        ),
        seed=seed,
    )


def end_of(update: Update) -> list[Tensor]:
    """Everything that a run leaves, and what torch would draw next."""
    state = update.optimizer.state_dict()["state"]
    held = [torch.as_tensor(value) for one in state.values() for value in one.values() if value is not None]
    scale = [] if update.scaler is None else [torch.tensor(update.scaler.get_scale())]
    return [*update.model.state_dict().values(), *held, *scale, torch.tensor(_lr(update)), torch.rand(4)]


def _lr(update: Update) -> float:
    return float(update.optimizer.param_groups[0]["lr"])


def record_cuts(update: Update) -> list[MicroBatches]:
    """Each cut that is about to run, from now on: the last one before an update's end is what it learnt from."""
    cuts: list[MicroBatches] = []
    prepare = update.accumulator.prepare

    def recording(*args: Any, **kwargs: Any) -> Any:
        prepared = prepare(*args, **kwargs)
        cuts.append(prepared[0].cut)
        return prepared

    update.accumulator.prepare = recording  # type: ignore[method-assign]
    return cuts


def operations(setting: Setting, number: int) -> tuple[int, int]:
    """How many operations update `number` has, and how many of them come after its last backward pass."""
    update, batches = setting.start()
    for batch in batches[:number]:
        update(batch)
    with OutOfMemoryAt() as counting:
        at_last_backward = 0

        def note(event: Any) -> None:
            nonlocal at_last_backward
            if event.stage == "accumulate":
                at_last_backward = len(counting.seen)

        update.observer = note
        update(batches[number])
    return len(counting.seen), len(counting.seen) - at_last_backward


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How one run with an out-of-memory ended."""

    setting: Setting
    number: int
    operation: str
    is_tail: bool
    retries: int
    difference: float
    """The largest difference of any number to the undisturbed run; 0.0 is bit for bit."""
    error: str = ""

    @property
    def is_right(self) -> bool:
        return not self.error and self.difference == 0.0


def run(seed: int) -> Ended:
    """Train with one out-of-memory at a random operation, and compare."""
    setting, draw = drawn(seed), random.Random(seed + 10**6)
    number, is_tail = draw.randrange(UPDATES), seed // len(KINDS) % 2 == 1
    total, tail = operations(setting, number)
    point = total - 1 - draw.randrange(tail) if is_tail else draw.randrange(total)
    update, batches = setting.start()
    cuts, ran, retries = record_cuts(update), [], 0
    injected, error = OutOfMemoryAt(point), ""
    try:
        for index, batch in enumerate(batches):
            with injected if index == number else nullcontext():
                retries += update(batch).retries
            ran.append(cuts[-1])
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    return Ended(
        setting=setting,
        number=number,
        operation=injected.seen[point] if point < len(injected.seen) else "none",
        is_tail=is_tail,
        retries=retries,
        difference=float("nan") if error else _difference(end_of(update), _undisturbed(setting, ran)),
        error=error,
    )


def _undisturbed(setting: Setting, cuts: list[MicroBatches]) -> list[Tensor]:
    update, _ = setting.start()
    for cut in cuts:
        update(cut)
    return end_of(update)


def _difference(got: list[Tensor], expected: list[Tensor]) -> float:
    pairs = zip(got, expected, strict=True)
    return max(float((one.double() - other.double()).abs().max()) for one, other in pairs)


def updates_until_back(kind: Kind) -> int | None:
    """After how many updates micro-batches are as large again as they were; None where they are not within 50."""
    torch.manual_seed(0)
    model, batch = kind.model(), kind.batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    update = Update(model, optimizer, kind.objective, micro_batch=kind.split(), batch_norm=kind.batch_norm, check="off")
    cuts = record_cuts(update)

    def largest() -> int:
        update(batch)
        return max(len(rows) for rows in cuts[-1].row_numbers)

    before = [largest() for _ in range(13)][-1]  # "auto" tries sizes in the first ones
    with TakenByAnother(attempts=2):
        assert largest() < before
    return next((number for number in range(1, 51) if largest() >= before), None)


class TakenByAnother(OutOfMemoryAt):
    """Another process holds the memory during these attempts: backward fails in each of them."""

    def __init__(self, attempts: int) -> None:
        super().__init__()
        self.left = attempts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.left and "tanh_backward" in func.name():
            self.left -= 1
            raise torch.OutOfMemoryError("CUDA out of memory: another process holds it")
        return func(*args, **(kwargs or {}))


def main() -> int:
    """0 where every run ended right, and every split came back."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first run; each has the next")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    gc.freeze()
    ended = []
    for seed in range(arguments.seed, arguments.seed + arguments.runs):
        ended.append(run(seed))
        last = ended[-1]
        if not last.is_right:
            print(
                f"seed {seed}: {last.setting}; update {last.number}, {last.operation}: {last.error or last.difference}"
            )
    right = sum(one.is_right for one in ended)
    where = Counter("after the last backward pass" if one.is_tail else "anywhere" for one in ended)
    print(f"{right} of {len(ended)} ended bit for bit as an undisturbed run ({dict(where)})")
    print(f"{sum(one.retries > 0 for one in ended)} told of a retry; the others needed none, or had not begun yet")
    back = {name: updates_until_back(kind) for name, kind in KINDS.items()}
    print("updates until the size is back after another process's out-of-memory:", back)
    return 0 if right == len(ended) and all(back.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

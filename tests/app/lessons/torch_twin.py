"""What the pages compute, computed by torch: the same numbers drawn, the same text executed by Python itself.

What each row counts for is measured by autograd: a ledger with an entry per row, all zero, is added to the loss so that
its gradient is the row's weight.
"""

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

FEATURES, HIDDEN = 10, 8


def uniform(seed: int) -> Iterator[float]:
    """mulberry32."""
    mask, state = 0xFFFFFFFF, seed
    while True:
        state = (state + 0x6D2B79F5) & mask
        t = ((state ^ (state >> 15)) * (state | 1)) & mask
        t = (((t + ((t ^ (t >> 7)) * (t | 61))) & mask) ^ t) & mask
        yield ((t ^ (t >> 14)) & mask) / 4294967296


def normal(draw: Iterator[float]) -> float:
    total = -6.0
    for _ in range(12):
        total += next(draw)
    return total


@dataclass(frozen=True)
class Data:
    x: Tensor
    y: Tensor
    unit: Tensor
    starts: list[int]

    def rows(self, first: int, last: int) -> slice:
        return slice(self.starts[first], self.starts[last])


@cache
def dataset(kind: str, rows: int, seed: int) -> Data:
    draw = uniform(seed)
    starts = [0]
    for _ in range(rows):
        starts.append(starts[-1] + (1 + math.floor(12 * next(draw) ** 3) if kind == "tokens" else 1))
    x, y, unit = [], [], []
    for first, last in pairwise(starts):
        for _ in range(first, last):
            values = [normal(draw) for _ in range(FEATURES)]
            total = 0.0
            for value in values:
                total += value
            if kind == "tokens":
                values[0] += 0.25 * (last - first - 4)
            x.append(values)
            y.append(int(total > (4 if kind == "classes" else 0)))
            if kind == "outlier" and len(x) == 991 and seed == 1:
                x[-1] = [30 * value for value in x[-1]]
                y[-1] = 1 - y[-1]
            unit.append(9.0 if kind == "classes" and y[-1] else 1.0)
    return Data(torch.tensor(x, dtype=torch.float64), torch.tensor(y), torch.tensor(unit, dtype=torch.float64), starts)


def make_model(kind: str, seed: int) -> nn.Module:
    draw = uniform(1000 + seed)

    def affine(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
        layer = nn.Linear(inputs, outputs, bias=bias, dtype=torch.float64)
        for parameter in layer.parameters():
            values = [(2 * next(draw) - 1) / math.sqrt(inputs) for _ in range(parameter.numel())]
            parameter.data = torch.tensor(values, dtype=torch.float64).view_as(parameter)
        return layer

    if kind == "linear":
        return affine(FEATURES, 2)
    if kind == "net":
        return nn.Sequential(affine(FEATURES, HIDDEN), nn.Tanh(), affine(HIDDEN, 2))
    first = affine(FEATURES, HIDDEN, bias=False)
    norm = nn.BatchNorm1d(HIDDEN, dtype=torch.float64)
    return nn.Sequential(first, norm, nn.Tanh(), affine(HIDDEN, 2))


@dataclass(frozen=True)
class Setting:
    text: str
    task: str = "rows"
    model: str = "linear"
    optimizer: str = "sgd"
    lr: float = 0.1
    rows: int = 1000
    micro: int = 16
    every: int = 4
    epochs: int = 10
    clip: float = 0
    schedule: bool = False
    bf16: bool = False
    seed: int = 0
    breaks: tuple[str, ...] = ()
    judged: bool = True


@dataclass
class Update:
    error: float
    grad: Tensor
    rate: float
    wanted_rate: float
    window: int


@dataclass
class Run:
    setting: Setting
    updates: list[Update] = field(default_factory=list)
    counts: Tensor | None = None
    weights: Tensor | None = None
    grad: Tensor | None = None
    epochs: list[tuple[float, float, float]] = field(default_factory=list)
    passes: int = 0
    rate: float = 0.0
    error: str | None = None

    @property
    def worst(self) -> float:
        return max((update.error for update in self.updates), default=0.0)

    @property
    def off(self) -> int:
        return sum(update.error > 1e-9 for update in self.updates)


def run(setting: Setting) -> Run:
    return _Machine(setting).run()


def optimizer_of(kind: str, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    if kind == "adam":
        return torch.optim.Adam(model.parameters(), lr=lr)
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9 if kind == "momentum" else 0)


class _Machine:
    def __init__(self, setting: Setting) -> None:
        self.setting, self.found = setting, Run(setting)
        self.data = dataset(setting.task, setting.rows, 1)
        self.model = make_model(setting.model, setting.seed)
        self.optimizer = optimizer_of(setting.optimizer, self.model, setting.lr)
        self.ledger = nn.Parameter(torch.zeros(setting.rows, dtype=torch.float64))
        spans = [(a, min(a + setting.micro, setting.rows)) for a in range(0, setting.rows, setting.micro)]
        self.loader = [(self.data.x[self.data.rows(*span)], self.data.y[self.data.rows(*span)]) for span in spans]
        self.spans = {id(y): span for (_, y), span in zip(self.loader, spans, strict=True)}
        self.windows = [
            (spans[k][0], spans[min(k + setting.every, len(spans)) - 1][1]) for k in range(0, len(spans), setting.every)
        ]
        self.total = setting.epochs * len(self.windows)
        self.names: dict[str, Any] = {}
        self.counts: dict[int, Tensor] = {}
        if setting.bf16:
            for p in self.model.parameters():
                p.register_hook(lambda g: g.bfloat16().double())
                p.register_post_accumulate_grad_hook(round_sum)

    # what the text may name

    def criterion(self, outputs: Tensor, y: Tensor) -> Tensor:
        first, last = self.spans[id(y)]
        unit = self.data.unit[self.data.rows(first, last)]
        classes = torch.tensor([1.0, 9.0], dtype=torch.float64) if self.setting.task == "classes" else None
        loss = nn.functional.cross_entropy(outputs, y, weight=classes)
        loss.register_hook(self.count_pass)
        return loss + self.ledger[first:last].sum() / unit.sum()

    def count_pass(self, _: Tensor) -> None:
        self.found.passes += 1

    def share(self, i: int) -> float:
        first, last = self.spans[id(self.loader[i][1])]
        window = self.windows[i // self.setting.every]
        return float(self.data.unit[self.data.rows(first, last)].sum() / self.data.unit[self.data.rows(*window)].sum())

    def clip(self, parameters: Any, most: float) -> None:
        total = nn.utils.clip_grad_norm_(parameters, most)
        if self.ledger.grad is not None:
            self.ledger.grad.mul_(min(1.0, float(most / (total + 1e-6))))

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()
        self.ledger.grad = None

    def step(self) -> None:
        if self.setting.judged:
            self.found.updates.append(self.judge())
        self.optimizer.step()

    def judge(self) -> Update:
        i, epoch = self.names.get("i", 0), self.names.get("epoch", 0)
        number = i // self.setting.every
        rows = self.data.rows(*self.windows[number])
        classes = torch.tensor([1.0, 9.0], dtype=torch.float64) if self.setting.task == "classes" else None
        loss = nn.functional.cross_entropy(self.model(self.data.x[rows]), self.data.y[rows], weight=classes)
        parameters = list(self.model.parameters())
        truth = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])
        if self.setting.bf16:
            # hooks rounded it, and the truth is not rounded: take it from a model without hooks
            twin = make_model(self.setting.model, 0)
            twin.load_state_dict(self.model.state_dict())
            loss = nn.functional.cross_entropy(twin(self.data.x[rows]), self.data.y[rows], weight=classes)
            truth = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(twin.parameters()))])
        factor = 1.0
        if "clip_grad_norm_" in self.setting.text:
            factor = min(1.0, (self.setting.clip or 1) / (float(truth.norm()) + 1e-6))
            truth = truth * factor
        grad = flat_gradient(self.model)
        counts = self.counts.setdefault(epoch, torch.zeros(self.setting.rows, dtype=torch.float64))
        if self.ledger.grad is not None:
            units = [self.data.unit[self.data.rows(*window)].sum() for window in self.windows]
            span = self.setting.micro * self.setting.every
            wanted = torch.stack([units[row // span] for row in range(self.setting.rows)])
            counts += self.ledger.grad * wanted / factor
        done = epoch * len(self.windows) + number
        wanted_rate = self.setting.lr * (max(0.0, 1 - done / self.total) if "scheduler" in self.setting.text else 1)
        rate = self.optimizer.param_groups[0]["lr"]
        return Update(float((grad - truth).norm() / truth.norm()), grad, rate, wanted_rate, number)

    def run(self) -> Run:
        setting, found = self.setting, self.found
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda done: max(0.0, 1 - done / max(self.total, 1))
        )
        watched = replace_methods(step=self.step, zero_grad=self.zero_grad)
        self.names |= {
            "model": self.model,
            "optimizer": watched,
            "criterion": self.criterion,
            "loader": self.loader,
            "epochs": setting.epochs,
            "range": lambda n: self.epochs(n),
            "N": setting.every,
            "share": self.share,
            "clip_grad_norm_": self.clip,
            "max_norm": setting.clip or 1,
            "scheduler": scheduler,
        }
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a scheduler stepped before the optimizer
                exec(compile(setting.text, "loop", "exec"), self.names)
        except (IndentationError, NameError, RuntimeError) as error:
            found.error = type(error).__name__
        found.epochs.append(self.evaluate())
        found.counts = self.counts.get(0, torch.zeros(setting.rows, dtype=torch.float64))
        found.weights = torch.cat([p.detach().flatten() for p in self.model.parameters()])
        found.grad, found.rate = flat_gradient(self.model), self.optimizer.param_groups[0]["lr"]
        return found

    def epochs(self, n: int) -> Iterator[int]:
        seen = False
        for epoch in range(n):
            if seen:
                self.found.epochs.append(self.evaluate())
            seen = True
            yield epoch

    def evaluate(self) -> tuple[float, float, float]:
        data = dataset(self.setting.task, self.setting.rows, 2)
        classes = torch.tensor([1.0, 9.0], dtype=torch.float64) if self.setting.task == "classes" else None
        with torch.no_grad():
            outputs = self.model(data.x)
            loss = nn.functional.cross_entropy(outputs, data.y, weight=classes)
        return float(loss), float((outputs.argmax(1) == data.y).double().mean()), float(outputs.softmax(1)[6, 1])


def round_sum(parameter: Tensor) -> None:
    parameter.grad = parameter.grad.bfloat16().double()


def flat_gradient(model: nn.Module) -> Tensor:
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])


def replace_methods(**methods: Callable[..., None]) -> Any:
    return type("Watched", (), {name: staticmethod(method) for name, method in methods.items()})


def same(setting: Setting, **changes: Any) -> Setting:
    return replace(setting, **changes)

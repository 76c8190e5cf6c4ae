"""Gradients of micro-batches on the device, beside one backward pass over the whole batch in float64 on the CPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from anybatch.core import Accumulator, Coupled, Objective, Update, free_memory, free_on_device, has_counters, supervised
from anybatch.display import show_bytes
from anybatch.errors import first_line
from anybatch.memory import MARGIN, Fit, measure_peak, plan
from anybatch.objectives import info_nce

Group = Literal["exactness", "memory", "speed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """One claim, measured on this device."""

    group: Group
    name: str
    found: str
    """The number that was measured, with its unit; or the first line of what was raised."""
    wanted: str
    """What it has to be; where this is empty, the number is told and judges nothing."""
    has_passed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTest:
    """All claims, and where they were measured."""

    device: str
    """As people call it: "NVIDIA A100-SXM4-40GB (cuda:0)"."""
    versions: dict[str, str]
    seconds: float
    checks: tuple[Checked, ...]

    @property
    def has_passed(self) -> bool:
        """True if every check has."""
        return all(check.has_passed for check in self.checks)


def run_self_test(
    device: torch.device,
    *,
    versions: dict[str, str],
    num_rows: int | None = None,
    tell: Callable[[Checked], None] = lambda check: None,
) -> SelfTest:
    """Every check on `device`; `tell` is called with each as it ends. `num_rows` is the batch of memory and speed checks."""
    begin = perf_counter()
    count = num_rows or (ON_HOST if device.type == "cpu" else ON_DEVICE)
    groups: dict[Group, Iterator[Checked]] = {
        "exactness": exactness_checks(device),
        "memory": memory_checks(device, count),
        "speed": speed_checks(device, count),
    }
    checks: list[Checked] = []
    for group, found in groups.items():
        for check in _until_it_raises(group, found):
            checks.append(check)
            tell(check)
    return SelfTest(device=name_of(device), versions=versions, seconds=perf_counter() - begin, checks=tuple(checks))


def _until_it_raises(group: Group, found: Iterator[Checked]) -> Iterator[Checked]:
    try:
        yield from found
    except Exception as error:  # whatever a device may raise is what was to be found out
        found_out = first_line(error)[:200]
        yield Checked(group=group, name=f"the rest of {group}", found=found_out, wanted="no error", has_passed=False)


def name_of(device: torch.device) -> str:
    """The device as people call it, where torch knows how they do."""
    told = getattr(torch.get_device_module(device), "get_device_name", None) if device.type != "cpu" else None
    return str(device) if told is None else f"{told(device)} ({device})"


ROWS, FEATURES, CLASSES, MICRO_BATCH = 60, 16, 5, 8


WEIGHTS = (0.2, 1.0, 20.0, 1.0, 3.0)


FP32, BF16 = 2e-6, 2e-2
"""What gradients may be off by where forwards run in this precision."""


Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A model, the loss of all rows by plain torch, the same as an objective, and how it is accumulated."""

    model: Callable[[], nn.Module]
    whole: Loss
    objective: Callable[[torch.device], Objective | Coupled]
    options: dict[str, Any] = field(default_factory=dict)
    at_most: float = FP32


def exactness_checks(device: torch.device) -> Iterator[Checked]:
    """One check for each setup, and the common mistake, which has to be seen."""
    for name, setup in SETUPS.items():
        error = _error(setup, device)
        wanted = f"at most {setup.at_most:.0e}"
        yield Checked(
            group="exactness", name=name, found=f"{error:.1e}", wanted=wanted, has_passed=error <= setup.at_most
        )
    wrong = _mean_of_means(device)
    name = "the mean of means, to see it fail"
    yield Checked(group="exactness", name=name, found=f"{wrong:.1e}", wanted="more than 1e-02", has_passed=wrong > 1e-2)


def mlp(*inside: Callable[[], nn.Module], width: int = 64) -> nn.Module:
    """Two layers, the same whenever they are made; `inside` comes between."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        between = [make() for make in inside]
        return nn.Sequential(nn.Linear(FEATURES, width), *between, nn.Tanh(), nn.Linear(width, CLASSES))


def some_rows(count: int = ROWS) -> tuple[Tensor, Tensor]:
    """Inputs, and targets of which some are ignored."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, FEATURES, generator=generator)
    targets = torch.randint(0, CLASSES, (count,), generator=generator)
    targets[: count // 4 : 2] = -100
    return inputs, targets


def counted_targets(device: torch.device, weights: tuple[float, ...] | None = None) -> Objective:
    """Cross entropy, with class weights where they are given."""
    return supervised(nn.CrossEntropyLoss(None if weights is None else torch.tensor(weights).to(device)))


def _cross_entropy(
    model: nn.Module, inputs: Tensor, targets: Tensor, weights: tuple[float, ...] | None = None
) -> Tensor:
    outputs = model(inputs)
    weight = None if weights is None else torch.tensor(weights, dtype=outputs.dtype)
    return functional.cross_entropy(outputs, targets, weight=weight)


def _pairs(model: nn.Module, inputs: Tensor) -> tuple[Tensor, Tensor]:
    return model(inputs), model(inputs.flip(1))


def _contrast(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    one, other = (functional.normalize(side) for side in _pairs(model, inputs))
    return functional.cross_entropy(one @ other.T / 0.5, torch.arange(len(inputs)))


def _contrastive(device: torch.device) -> Coupled:
    return Coupled(lambda model, batch: _pairs(model, batch[0]), info_nce(temperature=0.5, symmetric=False))


def _normed(width: int) -> Callable[[], nn.Module]:
    return partial(mlp, partial(nn.BatchNorm1d, width), width=width)


_plain = partial(Setup, whole=_cross_entropy, objective=counted_targets)


SETUPS = {
    "targets that are ignored": _plain(model=mlp),
    "class weights": Setup(
        model=mlp,
        whole=partial(_cross_entropy, weights=WEIGHTS),
        objective=partial(counted_targets, weights=WEIGHTS),
    ),
    "a contrastive loss over all rows": Setup(model=mlp, whole=_contrast, objective=_contrastive),
    "BatchNorm over the whole batch": _plain(model=_normed(64), options={"batch_norm": "exact"}),
    "the same, saved tensors put away": _plain(model=_normed(1024), options={"batch_norm": "exact", "offload": "away"}),
    "micro-batches sent ahead": _plain(model=mlp, options={"prefetch": True}),
    "bf16 parameters": _plain(model=lambda: mlp().bfloat16(), at_most=BF16),
    "autocast in bf16": _plain(model=mlp, options={"autocast": torch.bfloat16}, at_most=BF16),
}


def _error(setup: Setup, device: torch.device) -> float:
    """How far the accumulated gradient is from the whole batch's, of its norm."""
    is_host = device.type == "cpu"
    options = dict(setup.options)
    if options.get("offload") == "away":
        options["offload"] = "disk" if is_host else "host"
    model = setup.model().to(device)
    inputs, targets = some_rows()
    batch = inputs.to(next(model.parameters()).dtype), targets
    if not is_host and options.get("prefetch"):
        batch = batch[0].pin_memory(), batch[1].pin_memory()
    Accumulator(model, setup.objective(device), micro_batch=MICRO_BATCH, **options).backward(batch)
    return _off(model, setup)


def _mean_of_means(device: torch.device) -> float:
    setup = SETUPS["targets that are ignored"]
    model = setup.model().to(device)
    pieces = list(zip(*(column.to(device).split(MICRO_BATCH) for column in some_rows()), strict=True))
    for inputs, targets in pieces:
        (setup.whole(model, inputs, targets) / len(pieces)).backward()
    return _off(model, setup)


def _off(model: nn.Module, setup: Setup) -> float:
    twin = setup.model().double()
    inputs, targets = some_rows()
    setup.whole(twin, inputs.double(), targets).backward()
    ours, theirs = (
        torch.cat(
            [parameter.grad.cpu().double().flatten() for parameter in one.parameters() if parameter.grad is not None]
        )
        for one in (model, twin)
    )
    return float((ours - theirs).norm() / theirs.norm())


WIDTH = 512


MOST_OFF = 1e-5
"""Of weights after an update that started again: the same sums in another order."""


SLACK = 1.06
"""What is left free, out of the peak of what is to fit: its margin, and a little."""


PARTS = 16
"""Micro-batches are near equal in size, so few of them could leave much of the memory unused."""


_LAYER: tuple[Callable[[], nn.Module], ...] = (partial(nn.Linear, WIDTH, WIDTH), nn.ReLU)


_deep = partial(mlp, *_LAYER * 4, width=WIDTH)


def updating(device: torch.device, micro_batch: int | Fit) -> Update:
    """An update of a model of six layers, made there."""
    model = _deep().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)
    return Update(model, optimizer, counted_targets(device), micro_batch=micro_batch, check="off")


@dataclass(frozen=True, slots=True)
class FittingRun:
    """An update in micro-batches that fit, as it is when memory does not run out."""

    weights: list[Tensor]
    peak: int
    """The most that a second update had in use, model and optimizer included."""


def memory_checks(device: torch.device, num_rows: int) -> Iterator[Checked]:
    """Of batches of `num_rows`, of which a sixteenth fits; on the CPU, memory that runs out is pretended."""
    measured = _in_parts(device, num_rows)
    yield _planned(device, num_rows, measured)
    yield _starts_again(device, num_rows, measured)
    yield _fits(device, num_rows, measured)


def _in_parts(device: torch.device, num_rows: int) -> FittingRun:
    before = _taken(device)
    update = updating(device, num_rows // PARTS)
    update(some_rows(num_rows))
    weights = [parameter.detach().clone().cpu() for parameter in update.parameters()]
    _, peak = measure_peak(update, some_rows(num_rows))
    return FittingRun(weights, peak - before)


def _planned(device: torch.device, num_rows: int, measured: FittingRun) -> Checked:
    update = updating(device, num_rows // PARTS)
    update(some_rows(num_rows))
    found = plan(update.model, update.optimizer, counted_targets(device), some_rows(num_rows), memory="1TiB")
    predicted = found.peak(num_rows // PARTS)
    off = predicted / measured.peak - 1
    return Checked(
        group="memory",
        name="a plan, beside the real peak",
        found=f"{show_bytes(predicted)} and {show_bytes(measured.peak)}: {off:+.1%}",
        wanted="within 5 %",
        has_passed=abs(off) <= 0.05,
    )


def _starts_again(device: torch.device, num_rows: int, measured: FittingRun) -> Checked:
    free_memory()
    with _filled(device, int(measured.peak * SLACK)):
        update = updating(device, num_rows)
        if not has_counters(device):
            update.model.register_forward_pre_hook(partial(_refuse, num_rows // PARTS))
        result = update(some_rows(num_rows))
    pairs = zip(update.parameters(), measured.weights, strict=True)
    error = max(float((one.detach().cpu() - other).abs().max()) for one, other in pairs)
    return Checked(
        group="memory",
        name="memory runs out, the batch starts again" + ("" if has_counters(device) else " (pretended)"),
        found=f"{result.retries} restarts, {result.micro_batches} micro-batches, weights off by {error:.0e}",
        wanted=f"restarts, at most {MOST_OFF:.0e}",
        has_passed=result.retries > 0 and error <= MOST_OFF,
    )


def _fits(device: torch.device, num_rows: int, measured: FittingRun) -> Checked:
    free_memory()
    before, room = _taken(device), int(measured.peak * SLACK)
    with _filled(device, room) as filling:
        update = updating(device, Fit(None if has_counters(device) else room, margin=MARGIN))
        retries = update(some_rows(num_rows)).retries
        result, peak = measure_peak(update, some_rows(num_rows))
        used = (peak - before - filling) / room
    return Checked(
        group="memory",
        name="Fit, into what is left",
        found=f"{used:.0%} used, {retries + result.retries} restarts",
        wanted="90 % or more, no restart",
        has_passed=used >= 0.9 and retries + result.retries == 0,
    )


def _taken(device: torch.device) -> int:
    return torch.accelerator.memory_allocated(device) if has_counters(device) else 0


@contextmanager
def _filled(device: torch.device, room: int) -> Iterator[int]:
    """Inside this block `room` bytes are free there; the bytes that fill the rest. The CPU is left alone."""
    size = free_on_device(device) - room if has_counters(device) else 0
    filling = torch.empty(max(size, 0), dtype=torch.uint8, device=device)
    try:
        yield filling.nbytes
    finally:
        del filling


def _refuse(at_most: int, model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    if len(inputs[0]) > at_most:
        raise torch.OutOfMemoryError(f"pretended: {len(inputs[0])} rows, of which {at_most} fit")


REPEATS = 7


def speed_checks(device: torch.device, num_rows: int) -> Iterator[Checked]:
    """The overhead of `Update`, and what `prefetch` gains, by turns: the machine's moods fall on both."""
    ours, by_hand, ahead = updating(device, num_rows // 4), updating(device, 1), updating(device, num_rows // 4)
    ahead.running = replace(ahead.running, prefetch=True)
    batch = some_rows(num_rows)
    if device.type != "cpu":
        batch = batch[0].pin_memory(), batch[1].pin_memory()
    total = int((batch[1] != -100).sum())

    def loop() -> None:
        by_hand.optimizer.zero_grad()
        for inputs, targets in zip(*(column.split(num_rows // 4) for column in batch), strict=True):
            outputs = by_hand.model(inputs.to(device, non_blocking=True))
            there = targets.to(device, non_blocking=True)
            (functional.cross_entropy(outputs, there, reduction="sum") / total).backward()
        by_hand.optimizer.step()

    seconds = _by_turns(device, [loop, lambda: ours(batch), lambda: ahead(batch)])
    for name, taken in zip(("Update, beside a loop by hand", "the same with prefetch=True"), seconds[1:], strict=True):
        found = f"{1000 * taken:.1f} ms and {1000 * seconds[0]:.1f} ms: {taken / seconds[0] - 1:+.0%}"
        yield Checked(group="speed", name=name, found=found, wanted="", has_passed=True)


def _by_turns(device: torch.device, actions: list[Callable[[], object]]) -> list[float]:
    """The median seconds of each action, after one that is not counted."""
    taken: list[list[float]] = [[] for _ in actions]
    for _ in range(REPEATS + 1):
        for action, times in zip(actions, taken, strict=True):
            begin = perf_counter()
            action()
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
            times.append(perf_counter() - begin)
    return [median(times[1:]) for times in taken]


ON_HOST, ON_DEVICE = 4096, 131072
"""Rows of a batch: on a GPU enough that segments of 20 MiB do not matter."""

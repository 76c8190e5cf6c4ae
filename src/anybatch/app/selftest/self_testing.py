"""`anybatch self-test`: exactness, memory and speed on somebody's device, each claim with its number.

Gradients of micro-batches on the device are compared with one backward pass over the whole batch in float64 on the CPU.
"""

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

ON_HOST, ON_DEVICE = 4096, 131072
"""Rows of a batch: on a GPU enough that segments of 20 MiB do not matter."""
ROWS, FEATURES, CLASSES, MICRO_BATCH = 60, 16, 5, 8
WEIGHTS = (0.2, 1.0, 20.0, 1.0, 3.0)
FP32, BF16 = 2e-6, 2e-2
"""Limits for the error of gradients where forwards run in this precision."""
WIDTH = 512
MOST_OFF = 1e-5
"""Limit for weights after an update that started again: the same sums in another order."""
SLACK = 1.06
"""Memory that is left free, out of the peak of what is to fit: its margin, and a little."""
PARTS = 16
"""Micro-batches are near equal in size, so few of them could leave much of the memory unused."""
REPEATS = 7
Group = Literal["exactness", "memory", "speed"]


@dataclass(frozen=True, slots=True)
class Checked:
    """One claim, measured on this device."""

    group: Group
    name: str
    found: str
    """The number that was measured, with its unit; or the first line of what was raised."""
    wanted: str
    """The number that it has to be; where this is empty, the number is told and judges nothing."""
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
    """Run every check on `device`; `tell` is called with each as it ends. `num_rows`: the batch of memory and speed checks."""
    begin, checks = perf_counter(), []
    count = num_rows or (ON_HOST if device.type == "cpu" else ON_DEVICE)
    groups: dict[Group, Iterator[Checked]] = {
        "exactness": exactness_checks(device),
        "memory": memory_checks(device, count),
        "speed": speed_checks(device, count),
    }
    for group, found in groups.items():
        for check in _until_it_raises(group, found):
            checks.append(check)
            tell(check)
    name = getattr(torch.get_device_module(device), "get_device_name", None) if device.type != "cpu" else None
    named = str(device) if name is None else f"{name(device)} ({device})"
    return SelfTest(device=named, versions=versions, seconds=perf_counter() - begin, checks=tuple(checks))


def _until_it_raises(group: Group, found: Iterator[Checked]) -> Iterator[Checked]:
    try:
        yield from found
    except Exception as error:  # whatever a device may raise is what was to be found out
        yield Checked(group, f"the rest of {group}", first_line(error)[:200], "no error", False)


def mlp(*inside: Callable[[], nn.Module], width: int = 64) -> nn.Module:
    """Make two layers, the same every time; `inside` comes between."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        between = [make() for make in inside]
        return nn.Sequential(nn.Linear(FEATURES, width), *between, nn.Tanh(), nn.Linear(width, CLASSES))


def normed(width: int) -> nn.Module:
    """Make the same with BatchNorm inside."""
    return mlp(partial(nn.BatchNorm1d, width), width=width)


def some_rows(count: int = ROWS) -> tuple[Tensor, Tensor]:
    """Draw inputs, and targets of which some are ignored."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, FEATURES, generator=generator)
    targets = torch.randint(0, CLASSES, (count,), generator=generator)
    targets[: count // 4 : 2] = -100
    return inputs, targets


@dataclass(frozen=True, slots=True)
class Setup:
    """A model, its loss, how it is accumulated, and how far its gradient may be off."""

    model: Callable[[], nn.Module] = mlp
    options: dict[str, Any] = field(default_factory=dict)
    at_most: float = FP32
    weights: tuple[float, ...] | None = None
    is_contrastive: bool = False

    def objective(self, device: torch.device) -> Objective | Coupled:
        """The loss as an objective."""
        if self.is_contrastive:
            return Coupled(lambda model, batch: _pairs(model, batch[0]), info_nce(temperature=0.5, symmetric=False))
        return supervised(nn.CrossEntropyLoss(None if self.weights is None else torch.tensor(self.weights).to(device)))

    def whole(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of all rows by plain torch."""
        if self.is_contrastive:
            one, other = (functional.normalize(side) for side in _pairs(model, inputs))
            return functional.cross_entropy(one @ other.T / 0.5, torch.arange(len(inputs)))
        outputs = model(inputs)
        weight = None if self.weights is None else torch.tensor(self.weights, dtype=outputs.dtype)
        return functional.cross_entropy(outputs, targets, weight=weight)


def _pairs(model: nn.Module, inputs: Tensor) -> tuple[Tensor, Tensor]:
    return model(inputs), model(inputs.flip(1))


SETUPS = {
    "targets that are ignored": Setup(),
    "class weights": Setup(weights=WEIGHTS),
    "a contrastive loss over all rows": Setup(is_contrastive=True),
    "BatchNorm over the whole batch": Setup(partial(normed, 64), {"batch_norm": "exact"}),
    "the same, saved tensors put away": Setup(partial(normed, 1024), {"batch_norm": "exact", "offload": "away"}),
    "micro-batches sent ahead": Setup(options={"prefetch": True}),
    "bf16 parameters": Setup(lambda: mlp().bfloat16(), at_most=BF16),
    "autocast in bf16": Setup(options={"autocast": torch.bfloat16}, at_most=BF16),
}


def exactness_checks(device: torch.device) -> Iterator[Checked]:
    """Compare the gradient of each setup, and the common mistake, which has to be seen."""
    for name, setup in SETUPS.items():
        error = _accumulated_error(setup, device)
        yield Checked("exactness", name, f"{error:.1e}", f"at most {setup.at_most:.0e}", error <= setup.at_most)
    setup = SETUPS["targets that are ignored"]
    model = setup.model().to(device)
    pieces = list(zip(*(column.to(device).split(MICRO_BATCH) for column in some_rows()), strict=True))
    for inputs, targets in pieces:
        (setup.whole(model, inputs, targets) / len(pieces)).backward()
    wrong = _error(model, setup)
    yield Checked("exactness", "the mean of means, to see it fail", f"{wrong:.1e}", "more than 1e-02", wrong > 1e-2)


def _accumulated_error(setup: Setup, device: torch.device) -> float:
    is_host, options = device.type == "cpu", dict(setup.options)
    if options.get("offload") == "away":
        options["offload"] = "disk" if is_host else "host"
    model = setup.model().to(device)
    inputs, targets = some_rows()
    batch = inputs.to(next(model.parameters()).dtype), targets
    if not is_host and options.get("prefetch"):
        batch = batch[0].pin_memory(), batch[1].pin_memory()
    Accumulator(model, setup.objective(device), micro_batch=MICRO_BATCH, **options).backward(batch)
    return _error(model, setup)


def _error(model: nn.Module, setup: Setup) -> float:
    """How far the gradient is from the whole batch's, as a share of its norm."""
    twin = setup.model().double()
    inputs, targets = some_rows()
    setup.whole(twin, inputs.double(), targets).backward()
    found = [[one.grad for one in each.parameters() if one.grad is not None] for each in (model, twin)]
    ours, theirs = (torch.cat([grad.cpu().double().flatten() for grad in grads]) for grads in found)
    return float((ours - theirs).norm() / theirs.norm())


def updating(device: torch.device, micro_batch: int | Fit) -> Update:
    """Make an update of a model of six layers there."""
    model = mlp(*(partial(nn.Linear, WIDTH, WIDTH), nn.ReLU) * 4, width=WIDTH).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)
    return Update(model, optimizer, Setup().objective(device), micro_batch=micro_batch, check="off")


def memory_checks(device: torch.device, num_rows: int) -> Iterator[Checked]:
    """Check batches of `num_rows`, of which a sixteenth fits; on the CPU, memory that runs out is pretended."""
    size, batch, is_counted = num_rows // PARTS, some_rows(num_rows), has_counters(device)
    before = _taken(device)
    update = updating(device, size)
    update(batch)
    weights = [parameter.detach().clone().cpu() for parameter in update.parameters()]
    predicted = plan(update.model, update.optimizer, Setup().objective(device), batch, memory="1TiB").peak(size)
    peak = measure_peak(update, batch)[1] - before  # of an update that fits, model and optimizer included
    off = predicted / peak - 1
    found = f"{show_bytes(predicted)} and {show_bytes(peak)}: {off:+.1%}"
    yield Checked("memory", "a plan, beside the real peak", found, "within 5 %", abs(off) <= 0.05)

    del update
    free_memory()
    room = int(peak * SLACK)
    with _filled(device, room):
        update = updating(device, num_rows)
        if not is_counted:
            update.model.register_forward_pre_hook(partial(_refuse, size))
        result = update(batch)
    pairs = zip(update.parameters(), weights, strict=True)
    error = max(float((one.detach().cpu() - other).abs().max()) for one, other in pairs)
    name = "memory runs out, the batch starts again" + ("" if is_counted else " (pretended)")
    found = f"{result.retries} restarts, {result.micro_batches} micro-batches, weights off by {error:.0e}"
    has_passed = result.retries > 0 and error <= MOST_OFF
    yield Checked("memory", name, found, f"restarts, at most {MOST_OFF:.0e}", has_passed)

    del update
    free_memory()
    before = _taken(device)
    with _filled(device, room) as filling:
        update = updating(device, Fit(None if is_counted else room, margin=MARGIN))
        retries = update(batch).retries
        result, most = measure_peak(update, batch)
    used, retries = (most - before - filling) / room, retries + result.retries
    found, wanted = f"{used:.0%} used, {retries} restarts", "90 % or more, no restart"
    yield Checked("memory", "Fit, into what is left", found, wanted, used >= 0.9 and retries == 0)


def _taken(device: torch.device) -> int:
    return torch.accelerator.memory_allocated(device) if has_counters(device) else 0


@contextmanager
def _filled(device: torch.device, room: int) -> Iterator[int]:
    """Inside this block `room` bytes are free there; yields the bytes that fill the rest. The CPU is left alone."""
    size = free_on_device(device) - room if has_counters(device) else 0
    filling = torch.empty(max(size, 0), dtype=torch.uint8, device=device)
    try:
        yield filling.nbytes
    finally:
        del filling


def _refuse(at_most: int, model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    if len(inputs[0]) > at_most:
        raise torch.OutOfMemoryError(f"pretended: {len(inputs[0])} rows, of which {at_most} fit")


def speed_checks(device: torch.device, num_rows: int) -> Iterator[Checked]:
    """Time `Update`, and `prefetch`, beside a loop by hand, by turns: the machine's moods fall on all."""
    ours, by_hand, ahead = (updating(device, num_rows // 4) for _ in range(3))
    ahead.options = replace(ahead.options, prefetch=True)
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

    actions: list[Callable[[], object]] = [loop, lambda: ours(batch), lambda: ahead(batch)]
    times: list[list[float]] = [[] for _ in actions]
    for _ in range(REPEATS + 1):  # the first is not counted
        for action, taken in zip(actions, times, strict=True):
            begin = perf_counter()
            action()
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
            taken.append(perf_counter() - begin)
    hand, *others = (median(taken[1:]) for taken in times)
    for name, seconds in zip(("Update, beside a loop by hand", "the same with prefetch=True"), others, strict=True):
        found = f"{1000 * seconds:.1f} ms and {1000 * hand:.1f} ms: {seconds / hand - 1:+.0%}"
        yield Checked("speed", name, found, "", True)

"""`anybatch self-test`: check exactness, memory and speed on one device.

Accumulated gradients on the device are compared with one backward pass over the whole batch in float64 on the CPU.
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

ON_HOST, ON_DEVICE = 4096, 131072  # rows of a batch; on a GPU enough that segments of 20 MiB do not matter
ROWS, FEATURES, CLASSES, MICRO_BATCH = 60, 16, 5, 8
WEIGHTS = (0.2, 1.0, 20.0, 1.0, 3.0)
FP32, BF16 = 2e-6, 2e-2  # largest relative error of a gradient by the precision of the forward
WIDTH = 512
MOST_OFF = 1e-5  # largest difference of weights after a restart, which sums in another order
SLACK = 1.06  # free memory as a multiple of the peak that has to fit: the margin, and a little
PARTS = 16  # micro-batches of the memory checks: with fewer, equal parts could leave much memory unused
REPEATS = 7
Group = Literal["exactness", "memory", "speed"]


@dataclass(frozen=True, slots=True)
class Checked:
    """One claim, measured on this device."""

    group: Group
    name: str
    found: str  # the number with its unit, or the first line of an error
    wanted: str  # the limit; empty for a number that decides nothing
    has_passed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTest:
    device: str  # such as "NVIDIA A100-SXM4-40GB (cuda:0)"
    versions: dict[str, str]
    seconds: float
    checks: tuple[Checked, ...]

    @property
    def has_passed(self) -> bool:
        return all(check.has_passed for check in self.checks)


def run_self_test(
    device: torch.device,
    *,
    versions: dict[str, str],
    num_rows: int | None = None,
    tell: Callable[[Checked], None] = lambda check: None,
) -> SelfTest:
    """Run every check on `device`, and call `tell` with each result. `num_rows` is the batch of memory and speed checks."""
    begin = perf_counter()
    checks: list[Checked] = []

    def take(check: Checked) -> None:
        checks.append(check)
        tell(check)

    count = num_rows or (ON_HOST if device.type == "cpu" else ON_DEVICE)
    groups: dict[Group, Iterator[Checked]] = {
        "exactness": exactness_checks(device),
        "memory": memory_checks(device, count),
        "speed": speed_checks(device, count),
    }
    for group, found in groups.items():
        try:
            for check in found:
                take(check)
        except Exception as error:  # anything that a device may raise is a result
            take(Checked(group, f"the rest of {group}", first_line(error)[:200], "no error", False))
    name = getattr(torch.get_device_module(device), "get_device_name", None) if device.type != "cpu" else None
    named = str(device) if name is None else f"{name(device)} ({device})"
    return SelfTest(device=named, versions=versions, seconds=perf_counter() - begin, checks=tuple(checks))


def mlp(*inside: Callable[[], nn.Module], width: int = 64) -> nn.Module:
    """Make two layers with `inside` between them; the weights are always the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        between = [make() for make in inside]
        return nn.Sequential(nn.Linear(FEATURES, width), *between, nn.Tanh(), nn.Linear(width, CLASSES))


def normed(width: int) -> nn.Module:
    return mlp(partial(nn.BatchNorm1d, width), width=width)


def some_rows(count: int = ROWS) -> tuple[Tensor, Tensor]:
    """Draw inputs, and targets, some of which are ignored."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, FEATURES, generator=generator)
    targets = torch.randint(0, CLASSES, (count,), generator=generator)
    targets[: count // 4 : 2] = -100
    return inputs, targets


@dataclass(frozen=True, slots=True)
class Setup:
    """A model, its loss, the options of `Accumulator`, and the largest relative error of the gradient."""

    model: Callable[[], nn.Module] = mlp
    options: dict[str, Any] = field(default_factory=dict)
    at_most: float = FP32
    weights: tuple[float, ...] | None = None
    is_contrastive: bool = False

    def objective(self, device: torch.device) -> Objective | Coupled:
        if self.is_contrastive:
            return Coupled(lambda model, batch: _pairs(model, batch[0]), info_nce(temperature=0.5, symmetric=False))
        return supervised(nn.CrossEntropyLoss(None if self.weights is None else torch.tensor(self.weights).to(device)))

    def whole(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Compute the loss of all rows with plain torch."""
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
    """Check the gradient of each setup, and that the mean of means is found to be wrong."""
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
    twin = setup.model().double()
    inputs, targets = some_rows()
    setup.whole(twin, inputs.double(), targets).backward()
    found = [[one.grad for one in each.parameters() if one.grad is not None] for each in (model, twin)]
    ours, theirs = (torch.cat([grad.cpu().double().flatten() for grad in grads]) for grads in found)
    return float((ours - theirs).norm() / theirs.norm())


def updating(device: torch.device, micro_batch: int | Fit) -> Update:
    model = mlp(*(partial(nn.Linear, WIDTH, WIDTH), nn.ReLU) * 4, width=WIDTH).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)
    return Update(model, optimizer, Setup().objective(device), micro_batch=micro_batch, check="off")


def memory_checks(device: torch.device, num_rows: int) -> Iterator[Checked]:
    """Check `plan`, the restart after an out-of-memory error (simulated on the CPU), and `Fit`."""
    size, batch, is_counted = num_rows // PARTS, some_rows(num_rows), has_counters(device)
    before = _allocated(device)
    update = updating(device, size)
    update(batch)
    weights = [parameter.detach().clone().cpu() for parameter in update.parameters()]
    predicted = plan(update.model, update.optimizer, Setup().objective(device), batch, memory="1TiB").peak(size)
    peak = measure_peak(update, batch)[1] - before  # model and optimizer included
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
    before = _allocated(device)
    with _filled(device, room) as filling:
        update = updating(device, Fit(None if is_counted else room, margin=MARGIN))
        retries = update(batch).retries
        result, most = measure_peak(update, batch)
    used, retries = (most - before - filling) / room, retries + result.retries
    found, wanted = f"{used:.0%} used, {retries} restarts", "90 % or more, no restart"
    yield Checked("memory", "Fit, into what is left", found, wanted, used >= 0.9 and retries == 0)


def _allocated(device: torch.device) -> int:
    return torch.accelerator.memory_allocated(device) if has_counters(device) else 0


@contextmanager
def _filled(device: torch.device, room: int) -> Iterator[int]:
    """Leave `room` bytes free on an accelerator inside the block; yield the bytes that fill the rest."""
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
    """Time `Update`, with and without `prefetch`, and a hand-written loop, in turns: the machine's load affects all of them."""
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

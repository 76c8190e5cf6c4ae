"""What an update costs beside a loop written by hand over the same micro-batches. Told, and judged by nobody."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import median
from time import perf_counter

import torch
from torch.nn import functional

from anybatch.selftest.checked import Checked
from anybatch.selftest.exactness_checks import some_rows
from anybatch.selftest.memory_checks import updating

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

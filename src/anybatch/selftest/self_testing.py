"""All checks on one device, one after the other; one that raises is one that failed, and the next is run."""

from collections.abc import Callable, Iterator
from time import perf_counter

import torch

from anybatch.errors import first_line
from anybatch.selftest.checked import Checked, Group, SelfTest
from anybatch.selftest.exactness_checks import exactness_checks
from anybatch.selftest.memory_checks import memory_checks
from anybatch.selftest.speed_checks import speed_checks

ON_HOST, ON_DEVICE = 4096, 131072
"""Rows of a batch: on a GPU enough that segments of 20 MiB do not matter."""


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

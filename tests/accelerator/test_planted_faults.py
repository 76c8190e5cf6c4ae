"""Tests of the tests: each fault that the device is there to show, planted, fails a test that passes without it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from anybatch import NonFiniteError
from anybatch.batch_norm.offload import SavedTensors
from anybatch.core import Batch, move, snapshot
from anybatch.core import gradients as shares
from anybatch.core.engine import Ahead
from anybatch.core.gradients import GradientSum
from tests.accelerator import test_core_on_device, test_counted, test_limits, test_prefetch
from tests.accelerator.on_device import on_device
from tests.accelerator.plugged import plug
from tests.accelerator.setups import cross_entropy


@contextmanager
def instead(owner: Any, name: str, fault: Any) -> Iterator[None]:
    right = getattr(owner, name)
    setattr(owner, name, fault)
    try:
        yield
    finally:
        setattr(owner, name, right)


def on_the_wrong_device(numbers: list[float], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    return torch.tensor(numbers, dtype=dtype)


def without_a_wait(self: Ahead, micro_batch: Batch, index: int, device: torch.device) -> Batch:
    there = self._coming.pop(index, None)
    if there is None:
        there = move(micro_batch, device)
    following = self._following.get(index)
    if following is not None:
        with self._stream:
            self._coming = {following: move(self._cut[following], device)}
    return there


_backward = GradientSum.backward


def with_a_copy_to_the_host(self: GradientSum, *arguments: Any) -> bool:
    kept = _backward(self, *arguments)
    for parameter in self.parameters:
        parameter.grad.to("cpu", non_blocking=True)
    return kept


def left_on_the_host(self: snapshot.Snapshot) -> None:
    for (module, name), (_, was) in self.buffers.items():
        snapshot.buffers_of(module)[name] = None if was is None else was().cpu()


def read_early(self: SavedTensors, storage: torch.UntypedStorage, device: torch.device) -> Callable[[], Tensor]:
    flat = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
    host = torch.empty(flat.shape, dtype=torch.uint8, pin_memory=True)
    host.copy_(flat, non_blocking=True)
    early = host.clone()
    return lambda: early.to(device)


FAULTS: dict[str, tuple[Any, Callable[..., None]]] = {
    "a tensor made on the wrong device": (
        (shares, "tensor_on", on_the_wrong_device),
        lambda: test_core_on_device.test_the_gradient_is_the_whole_batchs.__wrapped__(plug()),
    ),
    "a missing wait": (
        (Ahead, "bring", without_a_wait),
        partial(test_prefetch.test_weights_are_those_of_the_host.__wrapped__, cross_entropy),
    ),
    "a copy to the host in the loop": (
        (GradientSum, "backward", with_a_copy_to_the_host),
        partial(test_counted.test_an_update_waits_and_copies_as_the_page_says.__wrapped__, 'on_nonfinite="ignore"'),
    ),
    "a buffer not moved back": (
        (snapshot.Snapshot, "put_back", left_on_the_host),
        partial(
            test_limits.test_a_batch_that_does_not_fit_starts_again_smaller_and_learns_the_same.__wrapped__,
            "batch norm",
        ),
    ),
    "an offloaded tensor read early": (
        (SavedTensors, "_put", read_early),
        test_core_on_device.test_what_exact_batch_norm_puts_away_on_the_host_or_on_disk_comes_back,
    ),
}


@pytest.mark.parametrize("name", FAULTS)
@on_device
def test_a_fault_is_seen(name):
    fault, test = FAULTS[name]
    test = getattr(test, "__wrapped__", test)
    test()
    with instead(*fault), pytest.raises((AssertionError, RuntimeError, IndexError, NonFiniteError)):
        test()

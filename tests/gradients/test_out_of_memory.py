"""Out of memory at any operation: the batch starts again, smaller, and nothing is counted twice."""

import gc
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anybatch import (
    Coupled,
    MemoryLimitError,
    MicroBatches,
    Objective,
    Rows,
    Tokens,
    Update,
    info_nce,
    supervised,
)
from anybatch.gradients.out_of_memory import is_out_of_memory
from tests.injection import OutOfMemoryAt

KNOWN_MESSAGES = [
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "4000000000000 bytes. Error code 12 (Cannot allocate memory)",
    "[enforce fail at alloc_cpu.cpp:80] data. DefaultCPUAllocator: not enough memory: you tried to allocate 64 bytes.",
    "could not create a primitive",
    "could not execute a primitive",
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 7.79 GiB",
    "HIP out of memory. Tried to allocate 20.00 MiB",
    "XPU out of memory. Tried to allocate 20.00 MiB",
    "MPS backend out of memory (MPS allocated: 8.51 GB, other allocations: 312.00 MB, max allowed: 9.07 GB)",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuFFT error: CUFFT_ALLOC_FAILED",
    "Invalid buffer size: 13.20 GiB",
    "std::bad_alloc",
]
OTHER_MESSAGES = [
    "could not create a primitive descriptor for a convolution forward propagation primitive",
    "mat1 and mat2 shapes cannot be multiplied (4x3 and 4x2)",
    "CUDA error: device-side assert triggered",
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`",
    "DataLoader worker (pid 7) exited unexpectedly; its memory is out of reach",
]


@pytest.mark.parametrize("message", KNOWN_MESSAGES)
def test_every_known_message_is_recognised(message):
    assert is_out_of_memory(RuntimeError(message))
    assert not is_out_of_memory(ValueError(message))


@pytest.mark.parametrize("message", OTHER_MESSAGES)
def test_other_errors_are_not(message):
    assert not is_out_of_memory(RuntimeError(message))


def test_types_are_recognised_whatever_they_say():
    assert is_out_of_memory(torch.OutOfMemoryError("?"))
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(OSError(12, "Cannot allocate memory"))
    assert not is_out_of_memory(OSError(28, "No space left on device"))
    assert not is_out_of_memory(MemoryLimitError("a row does not fit"))


def test_what_the_allocator_really_raises_is_recognised():
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(raised.value)


@pytest.fixture(autouse=True)
def _quick_collection():
    """A collection looks at all objects of the process, 0.1 s with a test suite in it; here, at those of the test."""
    gc.freeze()
    yield
    gc.unfreeze()


@dataclass(frozen=True)
class Case:
    """A model with random draws and buffers, batches, and the split it starts and settles with."""

    model: Callable[[], nn.Module]
    objective: Objective | Coupled
    batches: list[Any]
    split: Callable[[], Any]
    settled: Callable[[], Any]
    batch_norm: str | None = None

    def train(self, split: Any, *, fail_at: int | None = None, updates: int = 10) -> tuple[nn.Module, list[int]]:
        """The model after these updates, and the retries of each; out of memory in the first update, or never."""
        torch.manual_seed(1)
        model = self.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        update = Update(model, optimizer, self.objective, micro_batch=split, batch_norm=self.batch_norm)
        retries = []
        for number in range(updates):
            with nullcontext() if fail_at is None or number else OutOfMemoryAt(fail_at):
                retries.append(update(self.batches[number % len(self.batches)]).retries)
        return model, retries


def num_operations(case: Case) -> int:
    """How many operations come before the step of the first update."""
    torch.manual_seed(1)
    model = case.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    update = Update(model, optimizer, case.objective, micro_batch=case.split(), batch_norm=case.batch_norm)
    with OutOfMemoryAt() as counting:
        update(case.batches[0])
    return counting.seen.index("aten._foreach_norm.Scalar")


def outcome(model: nn.Module) -> Tensor:
    """Weights, buffers, and what torch would draw next."""
    return torch.cat([*(tensor.double().flatten() for tensor in model.state_dict().values()), torch.rand(8)])


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 3))


def rows_case() -> Case:
    torch.manual_seed(0)
    batches = [(torch.randn(16, 6), torch.randint(0, 3, (16,))) for _ in range(3)]
    return Case(mlp, supervised(nn.CrossEntropyLoss()), batches, lambda: Rows(8), lambda: Rows(4))


class Bag(nn.Module):
    """The mean of embedded tokens, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 6)
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(6, 3))

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        mask = batch["attention_mask"].unsqueeze(-1)
        return self.head((self.embed(batch["input_ids"]) * mask).sum(1) / mask.sum(1))


def bag_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch), batch["labels"])


def ragged_batch() -> dict[str, Tensor]:
    lengths = torch.tensor([8, 2, 7, 3, 1, 8, 4, 4])
    mask = (torch.arange(8) < lengths[:, None]).long()
    return {"input_ids": torch.randint(0, 20, (8, 8)), "attention_mask": mask, "labels": torch.randint(0, 3, (8,))}


def tokens_case() -> Case:
    from anybatch import Cost

    torch.manual_seed(0)
    return Case(
        Bag,
        Objective(bag_loss),
        [ragged_batch() for _ in range(3)],
        lambda: Tokens(32, cost=Cost(fixed=100), slack=0),
        lambda: Tokens(12, cost=Cost(fixed=100), slack=0),
    )


def coupled_case() -> Case:
    torch.manual_seed(0)
    objective = Coupled(lambda model, pair: (model(pair[0]), model(pair[1])), info_nce(temperature=0.5))
    batches = [(torch.randn(8, 6), torch.randn(8, 6)) for _ in range(3)]
    return Case(mlp, objective, batches, lambda: Rows(4), lambda: Rows(2))


def norm_case() -> Case:
    torch.manual_seed(0)
    batches = [(torch.randn(16, 6), torch.randint(0, 3, (16,))) for _ in range(3)]

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 3), nn.BatchNorm1d(3)
        )

    return Case(model, supervised(nn.CrossEntropyLoss()), batches, lambda: Rows(8), lambda: Rows(4), "exact")


def micro_norm_case() -> Case:
    return replace(norm_case(), batch_norm="micro")


def given_case() -> Case:
    rows = rows_case()
    parts = [MicroBatches([(x[:8], y[:8]), (x[8:], y[8:])]) for x, y in rows.batches]
    return Case(mlp, rows.objective, parts, lambda: 64, lambda: 64)


CASES = [rows_case, tokens_case, coupled_case, norm_case, micro_norm_case]


@pytest.mark.parametrize("make", CASES)
def test_out_of_memory_at_every_operation_ends_in_the_weights_of_a_run_that_began_with_the_smaller_micro_batch(make):
    """Bit for bit, with dropout: weights, buffers, and the random state after it."""
    case = make()
    at_once, begun_smaller = (outcome(case.train(split())[0]) for split in (case.split, case.settled))
    total = 0
    for point in range(num_operations(case)):
        model, retries = case.train(case.split(), fail_at=point)
        assert retries[1:] == 9 * [0], point
        # while nothing has run yet, there is nothing to make smaller
        assert torch.equal(outcome(model), begun_smaller if retries[0] else at_once), point
        total += retries[0]
    assert total > 40

"""Out of memory at any operation: the batch starts again, smaller, and nothing is counted twice."""

import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anybatch import (
    Accumulator,
    Auto,
    Cost,
    Coupled,
    Dealt,
    MemoryLimitError,
    MicroBatches,
    Objective,
    Rows,
    Sum,
    Tokens,
    Update,
    info_nce,
    stages,
    supervised,
)
from anybatch.core.out_of_memory import is_out_of_memory
from anybatch.core.splits import smaller
from tests.injection import OutOfMemoryAbove, OutOfMemoryAt
from tests.reference import gradient, relative_error, whole_batch_gradient

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


def outcome_without_draw(model: nn.Module) -> Tensor:
    """Weights and buffers."""
    return torch.cat([tensor.double().flatten() for tensor in model.state_dict().values()])


def outcome(model: nn.Module) -> Tensor:
    """Weights, buffers, and what torch would draw next."""
    return torch.cat([outcome_without_draw(model), torch.rand(8)])


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
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))

    return Case(model, supervised(nn.CrossEntropyLoss()), batches, lambda: Rows(8), lambda: Rows(4), "exact")


def micro_norm_case() -> Case:
    return replace(norm_case(), batch_norm="micro")


def given_case() -> Case:
    rows = rows_case()
    parts = [MicroBatches([(x[:8], y[:8]), (x[8:], y[8:])]) for x, y in rows.batches]
    return Case(mlp, rows.objective, parts, lambda: 64, lambda: 64)


class Thirds:
    """A split of the user's own, which knows nothing of memory."""

    def cut(self, batch: Any) -> MicroBatches:
        return MicroBatches([(batch[0][start : start + 6], batch[1][start : start + 6]) for start in (0, 6, 12)])


def custom_case() -> Case:
    return replace(rows_case(), split=Thirds, settled=Thirds)


CASES = [rows_case, tokens_case, coupled_case, norm_case, micro_norm_case]


@pytest.mark.parametrize("make", CASES)
def test_out_of_memory_at_every_operation_ends_in_the_weights_of_a_run_that_began_with_the_smaller_micro_batch(make):
    """Bit for bit, with dropout: weights, buffers, and the random state after it."""
    case = make()
    at_once, begun_smaller = (
        {updates: outcome(case.train(split(), updates=updates)[0]) for updates in (1, 10)}
        for split in (case.split, case.settled)
    )
    total = 0
    for point in range(num_operations(case)):
        updates = 1 if point % 16 else 10
        model, retries = case.train(case.split(), fail_at=point, updates=updates)
        assert not any(retries[1:]), point
        # while nothing has run yet, there is nothing to make smaller
        assert torch.equal(outcome(model), (begun_smaller if retries[0] else at_once)[updates]), point
        total += retries[0]
    assert total > 40


def test_a_retry_that_puts_nothing_back_is_wrong():
    """The naive retry: gradients zeroed, micro-batch halved; but dropout and BatchNorm go on from where the failure was."""
    case = norm_case()
    torch.manual_seed(1)
    model = case.model()
    accumulator = Accumulator(model, case.objective, micro_batch=4, batch_norm="exact")
    start = model.state_dict()
    torch.manual_seed(2)
    accumulator.backward(case.batches[0])
    right, statistics = gradient(model.parameters()), model[1].running_mean.clone()
    model.load_state_dict(start)
    for parameter in model.parameters():
        parameter.grad = None
    torch.manual_seed(2)
    accumulator.backward(case.batches[0])  # stands for the attempt that failed at its end
    model.zero_grad()
    accumulator.backward(case.batches[0])
    assert float((gradient(model.parameters()) - right).norm() / right.norm()) > 0.2
    assert not torch.allclose(model[1].running_mean, statistics, rtol=0.1)


@pytest.mark.parametrize("make", [given_case, lambda: replace(rows_case(), split=lambda: Auto(most=16)), custom_case])
def test_micro_batches_of_any_split_are_halved(make):
    """Without dropout the weights are those of the whole batch, whatever it was cut into; a limit stands in for memory."""
    case = replace(make(), model=lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
    reference, _ = replace(case, split=lambda: 16, batches=rows_case().batches).train(Rows(16))
    torch.manual_seed(1)
    model = case.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    update = Update(model, optimizer, case.objective, micro_batch=case.split())
    with OutOfMemoryAbove(3):
        results = [update(case.batches[number % 3]) for number in range(10)]
    assert sum(result.retries for result in results) in (1, 2)
    assert results[-1].retries == 0
    assert results[-1].micro_batches >= 6
    assert outcome(model)[:-8].sub(outcome(reference)[:-8]).norm() < 1e-6


def test_a_search_never_comes_back_to_what_did_not_fit():
    case = rows_case()
    auto = Auto()
    update = Update(mlp_ := mlp(), torch.optim.SGD(mlp_.parameters(), lr=0.1), case.objective, micro_batch=auto)
    with OutOfMemoryAbove(4):
        results = [update(batch) for batch in 8 * case.batches]
    assert sum(result.retries for result in results) <= 2
    assert auto.choice.is_settled
    assert max(trial.size for trial in auto.choice.trials) <= 4


def test_tokens_shrink_to_the_longest_row_and_then_by_rows():
    batch = ragged_batch()
    shrunk = Tokens(64)
    for _ in range(2):
        shrunk = smaller(shrunk, shrunk.cut(batch))
    cut = shrunk.cut(batch)
    assert cut.cut.largest <= 16
    assert sorted(row for rows in cut.row_numbers for row in rows) == list(range(8))
    while (found := smaller(shrunk, shrunk.cut(batch))) is not None:
        shrunk = found
    assert {len(rows) for rows in shrunk.cut(batch).row_numbers} == {1}


def test_gradients_from_before_are_kept_as_they_were():
    case = rows_case()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    before = [torch.randn_like(parameter) for parameter in model.parameters()]
    for parameter, grad in zip(model.parameters(), before, strict=True):
        parameter.grad = grad.clone()
    reference = whole_batch_gradient(
        model, lambda twin, batch: nn.CrossEntropyLoss()(twin(batch[0]), batch[1]), case.batches[0]
    )
    with OutOfMemoryAt(25):
        result = Accumulator(model, case.objective, micro_batch=8).backward(case.batches[0])
    assert result.retries == 1
    expected = reference + torch.cat([grad.double().flatten() for grad in before])
    assert relative_error(model, expected) < 5e-7


def test_a_row_that_does_not_fit_is_an_error_and_leaves_everything_as_it_was():
    case = micro_norm_case()
    model = case.model()
    start, random = outcome_without_draw(model), torch.get_rng_state()
    optimizer = torch.optim.AdamW(model.parameters())
    update = Update(model, optimizer, case.objective, micro_batch=8, batch_norm="micro")
    with OutOfMemoryAbove(0), pytest.raises(MemoryLimitError, match=r"single row.*DefaultCPUAllocator.*bfloat16"):
        update(case.batches[0])
    assert torch.equal(outcome_without_draw(model), start)
    assert torch.equal(torch.get_rng_state(), random)
    assert not optimizer.state
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_the_failed_attempt_held_is_free_before_the_next_one():
    alive, weak = [], []

    class Watched(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            alive.append([reference() is not None for reference in weak])
            y = super().forward(x)
            weak.append(weakref.ref(y))
            if len(weak) == 2:
                raise torch.OutOfMemoryError("at the second micro-batch")
            return y

    model = nn.Sequential(Watched(6, 3))
    result = Accumulator(model, supervised(nn.CrossEntropyLoss()), micro_batch=8).backward(rows_case().batches[0])
    assert result.retries == 1
    assert alive[2] == [False, False]


def test_the_observer_is_told_what_is_void_and_metrics_count_once():
    case = rows_case()
    seen: list[stages.Event] = []

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Any]]:
        return nn.functional.cross_entropy(model(batch[0]), batch[1]), {"rows": Sum(torch.ones(len(batch[1])).sum())}

    accumulator = Accumulator(mlp(), Objective(loss), micro_batch=8, observer=seen.append)
    with OutOfMemoryAt(30):
        result = accumulator.backward(case.batches[0])
    names = [event.stage for event in seen]
    assert names.count("retry") == 1
    assert names[names.index("retry") + 1 :].count("backward") == 4
    assert "OutOfMemoryError" in seen[names.index("retry")].reason
    assert float(result.metrics["rows"]) == 16


@pytest.mark.filterwarnings("ignore:the forward changes buffers of its own")
def test_a_buffer_that_changes_for_the_first_time_in_the_batch_that_fails_is_an_error_not_a_wrong_state():
    class Late(nn.Linear):
        def __init__(self) -> None:
            super().__init__(6, 3)
            self.register_buffer("calls", torch.zeros(()))
            self.is_late = False

        def forward(self, x: Tensor) -> Tensor:
            if self.is_late:
                self.calls += 1
            return super().forward(x)

    batch = rows_case().batches[0]
    model = Late()
    accumulator = Accumulator(model, supervised(nn.CrossEntropyLoss()), micro_batch=8)
    accumulator.backward(batch)
    model.is_late = True
    lost = r"first to change Late\.calls"
    with OutOfMemoryAt(25), pytest.warns(UserWarning, match=lost), pytest.raises(MemoryLimitError, match=lost):
        accumulator.backward(batch)
    model.calls.zero_()
    with OutOfMemoryAt(25), pytest.warns(UserWarning, match="the forward changes buffers of its own"):
        assert accumulator.backward(batch).retries == 1
    assert float(model.calls) == 4


@pytest.mark.filterwarnings("ignore:the forward changes buffers of its own")
def test_a_buffer_written_through_data_is_put_back():
    class Average(nn.Linear):
        def __init__(self) -> None:
            super().__init__(6, 3)
            self.register_buffer("mean", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.mean.data.mul_(0.9).add_(x.detach().sum())  # no version tells of it
            return super().forward(x)

    def learned(split: int, *points: int) -> float:
        torch.manual_seed(0)
        accumulator = Accumulator(Average(), supervised(nn.CrossEntropyLoss()), micro_batch=8)
        first, second = rows_case().batches[:2]
        accumulator.backward(first)
        accumulator.split = Rows(split)
        with OutOfMemoryAt(*points):
            assert accumulator.backward(second).retries == len(points)
        return float(accumulator.model.mean)

    assert learned(8, 40) == learned(4) != learned(8)


def test_other_errors_are_not_retried():
    def loss(model: nn.Module, batch: Any) -> Tensor:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        Accumulator(mlp(), Objective(loss), micro_batch=8).backward(rows_case().batches[0])


class AtMost(nn.Module):
    """Memory for so many rows."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")
        return x


def test_dealt_rows_that_come_cut_already_are_cut_further():
    torch.manual_seed(0)
    x, y = torch.randn(14, 6, dtype=torch.float64), torch.randint(0, 3, (14,))
    layer, objective = nn.Linear(6, 3).double(), supervised(nn.CrossEntropyLoss())
    model = nn.Sequential(AtMost(4), layer)
    given = Dealt(MicroBatches([(x[:8], y[:8]), (x[8:], y[8:])]), tuple(range(14)), 14)
    result = Accumulator(model, objective, micro_batch=2).backward(given)
    assert (result.retries, result.micro_batches) == (1, 4)
    grads = torch.autograd.grad(nn.functional.cross_entropy(layer(x), y), list(layer.parameters()))
    for parameter, grad in zip(layer.parameters(), grads, strict=True):
        torch.testing.assert_close(parameter.grad, grad)


def test_one_failure_that_was_somebody_elses_is_over_within_fifty_updates_and_said_once():
    model = nn.Linear(4, 2)
    told = []
    accumulator = Accumulator(model, Objective(lambda m, x: m(x).square().mean()), micro_batch=16, observer=told.append)
    with OutOfMemoryAbove(2), pytest.warns(UserWarning, match=r"memory ran out .*size=8.* grow again") as warned:
        accumulator.backward(torch.randn(64, 4))
    assert accumulator.split == Rows(2)
    sizes = []
    for _ in range(50):
        accumulator.backward(torch.randn(64, 4))
        sizes.append(accumulator.split.size)
    assert sizes == sorted(sizes)
    assert accumulator.split == Rows(16)
    assert len(warned) == 1
    assert [event.split for event in told if isinstance(event, stages.Resize)][-1] == "Rows(size=16)"


def test_where_memory_stays_short_it_grows_to_just_below_what_failed_and_seldom_tries_that_again():
    accumulator = Accumulator(nn.Linear(4, 2), Objective(lambda m, x: m(x).square().mean()), micro_batch=16)
    with OutOfMemoryAbove(14):
        results = [accumulator.backward(torch.randn(64, 4)) for _ in range(200)]
    largest = [-(-64 // result.micro_batches) for result in results]
    assert largest[15] == 13
    assert sum(result.retries for result in results) <= 5
    assert sum(one >= 13 for one in largest) > 150


def test_a_single_row_is_tried_once_more_and_then_the_users_own_line_is_in_the_traceback():
    def their_own_mistake(model: nn.Module, rows: Tensor) -> Tensor:
        raise MemoryError("a cache of their own is full")

    accumulator = Accumulator(nn.Linear(4, 2), Objective(their_own_mistake), micro_batch=8)
    with pytest.raises(MemoryLimitError, match="a cache of their own is full") as told:
        accumulator.backward(torch.randn(16, 4))
    lines = [str(entry) for entry in told.getrepr(chain=True, style="long").chain]
    assert any("their_own_mistake" in line for line in lines)
    assert accumulator.split == Rows(8), "what did not fit in any size says nothing of sizes"

    attempts = []

    def fails_once_at_one_row(model: nn.Module, rows: Tensor) -> Tensor:
        attempts.append(len(rows))
        if len(attempts) <= 4:
            raise MemoryError
        return model(rows).square().mean()

    accumulator = Accumulator(nn.Linear(4, 2), Objective(fails_once_at_one_row), micro_batch=8)
    assert accumulator.backward(torch.randn(8, 4)).retries == 4
    assert attempts[:5] == [8, 4, 2, 1, 1]

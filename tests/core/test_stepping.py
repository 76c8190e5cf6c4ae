"""A step that runs out of memory while it makes its state is undone, and made again; a later one is an error by name."""

import copy

import pytest
import torch
from torch import Tensor, nn

from anybatch import MemoryLimitError, Update, supervised
from anybatch.core.step import Stepping
from tests.injection import OutOfMemoryAt

OPTIMIZERS = {
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.1),
    "SGD, nesterov": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "Adam": lambda groups: torch.optim.Adam(groups, lr=0.1, amsgrad=True),
    "AdamW, foreach": lambda groups: torch.optim.AdamW(groups, lr=0.1, foreach=True),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=0.1, momentum=0.5, centered=True),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.1),
    "Adafactor": lambda groups: torch.optim.Adafactor(groups, lr=0.1),
}


def two_groups(make) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The first group is stepped before the second one's state is made."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    return model, make([{"params": list(layer.parameters())} for layer in model])


def fill(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def flat(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    held = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [*model.parameters(), *(torch.as_tensor(value) for value in held if value is not None)]
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_out_of_memory_at_every_operation_of_the_first_step_is_as_if_it_had_not_been(name):
    model, optimizer = two_groups(OPTIMIZERS[name])
    fill(model)
    with OutOfMemoryAt() as counting:
        for _ in range(3):
            optimizer.step()
    expected = flat(model, optimizer)
    half_applied = 0
    for point in range(len(counting.seen) // 3):
        model, optimizer = two_groups(OPTIMIZERS[name])
        fill(model)
        twin, naive = two_groups(OPTIMIZERS[name])
        fill(twin)
        half_applied += not torch.equal(_after_the_naive_retry(twin, naive, point), expected)
        stepping = Stepping(optimizer)
        injected = OutOfMemoryAt(point)

        def first_step(optimizer=optimizer, injected=injected) -> None:
            with injected:
                optimizer.step()

        assert stepping.step(first_step) == 1
        for _ in range(2):
            assert stepping.step(optimizer.step) == 0
        assert torch.equal(flat(model, optimizer), expected), counting.seen[point]
    assert half_applied > 0  # what the usual loop is left with


def _after_the_naive_retry(model: nn.Module, optimizer: torch.optim.Optimizer, point: int) -> Tensor:
    """What is there if a step that failed is simply made again; nothing, where it cannot be made on half of its state."""
    with pytest.raises(torch.OutOfMemoryError), OutOfMemoryAt(point):
        optimizer.step()
    try:
        for _ in range(3):
            optimizer.step()
    except (KeyError, AssertionError):
        return torch.empty(0)
    return flat(model, optimizer)


def test_a_second_failure_leaves_weights_optimizer_scheduler_scaler_and_statistics_as_they_were():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 10)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    update = Update(
        model,
        optimizer,
        supervised(nn.CrossEntropyLoss()),
        micro_batch=4,
        scheduler=scheduler,
        scaler=scaler,
        batch_norm="micro",
    )
    batch = (torch.randn(8, 4), torch.randint(0, 2, (8,)))
    before = copy.deepcopy([model.state_dict(), optimizer.state_dict(), scheduler.state_dict()])
    with pytest.raises(MemoryLimitError, match=r"twice in the first step of AdamW .*foreach=False"):
        _with_failing_step(update, optimizer, batch)
    after = [model.state_dict(), optimizer.state_dict(), scheduler.state_dict()]
    assert str(after) == str(before)
    assert scaler.get_scale() == 2.0**8
    assert update(batch).applied


def _with_failing_step(update: Update, optimizer: torch.optim.Optimizer, batch: object) -> None:
    own = optimizer.step

    def failing(*args: object) -> object:
        with OutOfMemoryAt(9):
            return own()

    optimizer.step = failing
    try:
        update(batch)
    finally:
        optimizer.step = own


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_out_of_memory_at_every_operation_of_a_later_step_says_that_the_optimizers_state_is_torn(name):
    model, optimizer = two_groups(OPTIMIZERS[name])
    fill(model)
    stepping = Stepping(optimizer)
    for _ in range(2):
        stepping.step(optimizer.step)
    with OutOfMemoryAt() as counting:
        optimizer.step()
    for point in range(len(counting.seen)):
        calls = []

        def later_step(point=point, calls=calls) -> None:
            calls.append(1)
            with OutOfMemoryAt(point):
                optimizer.step()

        with pytest.raises(
            MemoryLimitError, match=r"some parameters may have.*state is torn.*from the last checkpoint"
        ):
            stepping.step(later_step)
        assert len(calls) == 1, "a torn step must not be made again"


def test_a_later_step_that_never_fits_leaves_everything_as_it_was():
    """What it needs beside what it changes cannot be had, so it is copied first."""
    model, optimizer = two_groups(OPTIMIZERS["AdamW, foreach"])
    fill(model)
    stepping = Stepping(optimizer)
    for _ in range(2):
        stepping.step(optimizer.step)
    before = flat(model, optimizer)

    class NoRoom(OutOfMemoryAt):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.name().startswith("aten::_foreach_sqrt") or is_reserved(func, args):
                raise torch.OutOfMemoryError("CUDA out of memory")
            return func(*args, **(kwargs or {}))

    def is_reserved(func, args) -> bool:
        return func.name().startswith("aten::empty") and args[0] in ([nbytes] for _, nbytes in stepping._temporaries)

    with NoRoom(), pytest.raises(MemoryLimitError, match=r"twice in a step of AdamW .* as they were"):
        stepping.step(optimizer.step)
    assert torch.equal(flat(model, optimizer), before)


def test_only_the_first_two_steps_are_copied(monkeypatch):
    copied = []
    monkeypatch.setattr(
        "anybatch.core.snapshot.spilled_copy", lambda tensor, file: copied.append(tensor) or tensor.clone
    )
    model, optimizer = two_groups(lambda groups: torch.optim.SGD(groups, lr=0.1))
    fill(model)
    stepping = Stepping(optimizer)
    for _ in range(5):
        stepping.step(optimizer.step)
    assert len(copied) == 2 * 2 * 4  # parameters and gradients, twice

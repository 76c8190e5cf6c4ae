"""A first step that runs out of memory is undone, options and draws too, and made again; a later one is an error by name."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anybatch import MemoryLimitError, Objective, Update, supervised
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


class Restless(torch.optim.Optimizer):
    """Changes entries of its own groups and its gradients as it steps, makes new ones, counts, and adds noise."""

    def __init__(self, groups: Any, lr: float) -> None:
        super().__init__(groups, {"lr": lr, "num_steps": 0, "history": ()})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["num_steps"] += 1
            group["lr"] = group["lr"] * (0.5 if "has begun" in group else 0.9)
            group["history"] = (*group["history"], group["lr"])
            group["has begun"] = True
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    average = state.setdefault("average", torch.zeros_like(parameter))
                    state["num_calls"] = state.get("num_calls", 0) + 1
                    average.lerp_(parameter.grad.mul_(0.5), 0.1 / state["num_calls"])
                    noise = torch.randn_like(parameter)
                    parameter.sub_(group["lr"] * (average + 0.01 * noise) / group["num_steps"])


def make(optimizer: Callable[..., torch.optim.Optimizer] = Restless) -> Update:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.Linear(3, 2))
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters()), "lr": 0.3}]
    objective = Objective(lambda model, x: model(x).square().mean())
    return Update(model, optimizer(groups, lr=0.1), objective, micro_batch=3)


def rows() -> Tensor:
    return torch.randn(7, 4, generator=torch.Generator().manual_seed(2))


def failing_once(update: Update, mode: OutOfMemoryAt) -> None:
    """The next step of the optimizer runs in `mode`, which stays used up."""
    own = update.optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return own(*args, **kwargs)

    update.optimizer.step = step


def everything(update: Update) -> list[Any]:
    groups = [
        {key: value for key, value in group.items() if key != "params"} for group in update.optimizer.param_groups
    ]
    state = [
        {key: value.tolist() if isinstance(value, Tensor) else value for key, value in held.items()}
        for held in update.optimizer.state.values()
    ]
    weights = [parameter.tolist() for parameter in update.model.parameters()]
    return [groups, state, weights, torch.get_rng_state().tolist()]


def steps_of(update: Update, updates: int = 2) -> list[Any]:
    for _ in range(updates):
        update(rows())
    return copy.deepcopy(everything(update))


def num_operations(make_update: Callable[[], Update]) -> int:
    update = make_update()
    counting = OutOfMemoryAt()
    failing_once(update, counting)
    update(rows())
    return len(counting.seen)


def test_groups_and_random_state_are_put_back_wherever_memory_runs_out_in_the_first_step():
    expected = steps_of(make())
    points = range(num_operations(make))
    assert len(points) > 10
    for point in points:
        update = make()
        failing_once(update, OutOfMemoryAt(point))
        assert update(rows()).retries == 1
        assert steps_of(update, 1) == expected, point


def test_a_step_that_is_simply_made_again_has_counted_and_drawn_twice():
    expected = steps_of(make())
    update = make()
    own, torn = update.optimizer.step, OutOfMemoryAt(num_operations(make) - 1)

    def twice(*args: Any) -> None:
        with pytest.raises(torch.OutOfMemoryError), torn:
            own()
        own()

    update.optimizer.step = twice
    update(rows())
    update.optimizer.step = own
    groups, state, weights, random = steps_of(update, 1)
    assert [group["num_steps"] for group in groups] == [3, 3]
    assert groups != expected[0]
    assert state != expected[1]
    assert weights != expected[2]
    assert random != expected[3]


@pytest.mark.parametrize("name", ["Restless", "Adam", "SGD"])
def test_parameters_that_join_later_make_a_first_step_again_and_what_was_there_is_put_back(name):
    optimizers = {
        "Restless": Restless,
        "Adam": lambda groups, lr: torch.optim.Adam(groups, lr=lr, foreach=False),
        "SGD": lambda groups, lr: torch.optim.SGD(groups, lr=lr, momentum=0.9, foreach=False),
    }

    def joined() -> Update:
        """Two parameters have been stepped twice when two others, with gradients from now on, join them."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        optimizer = optimizers[name](list(model[0].parameters()), lr=0.1)
        update = Update(model, optimizer, Objective(lambda model, x: model(x).square().mean()), micro_batch=3)
        steps_of(update)
        optimizer.add_param_group({"params": list(model[1].parameters())})
        return update

    expected = steps_of(joined())
    for point in range(num_operations(joined)):
        update = joined()
        failing_once(update, OutOfMemoryAt(point))
        assert update(rows()).retries == 1
        assert steps_of(update, 1) == expected, point


def test_what_is_no_lack_of_memory_is_raised_as_it_is_and_not_tried_again():
    update, calls = make(), []

    def step(*args: Any) -> None:
        calls.append(1)
        raise ValueError("a bad group")

    update.optimizer.step = step
    with pytest.raises(ValueError, match="a bad group"):
        update(rows())
    assert len(calls) == 1

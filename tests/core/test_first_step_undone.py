"""Memory that runs out in an optimizer's first step: what the step had changed is put back, its options and draws too."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anybatch import Objective, Update
from tests.injection import OutOfMemoryAt


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

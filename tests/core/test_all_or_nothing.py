"""An update is done whole or not at all: whatever is raised, wherever, and whoever wrapped the optimizer."""

import copy
import os
import signal
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from anybatch import Coupled, Update, UpdateError, clip_loss, info_nce, stages, supervised
from tests.reference import whole_batch_gradient
from tests.setups import labelled


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()


class Failing(torch.optim.AdamW):
    """Raises in a step when it is told to, after the first parameter was stepped."""

    fails: type[BaseException] | None = None

    def step(self, closure: Any = None) -> Any:
        if self.fails is None:
            return super().step(closure)
        with torch.no_grad():
            self.param_groups[0]["params"][0].add_(1.0)
        raise self.fails("amid a step")


def make(model: nn.Module, optimizer: Any = None, **options: Any) -> Update:
    optimizer = optimizer or Failing(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    options = {"scaler": scaler, "clip_norm": 1.0, "batch_norm": "exact"} | options
    return Update(model, optimizer, supervised(nn.CrossEntropyLoss()), micro_batch=5, **options)


def state(update: Update) -> dict[str, Any]:
    held = {f"model.{name}": tensor.clone() for name, tensor in update.model.state_dict().items()}
    for number, entries in update.optimizer.state_dict()["state"].items():
        held |= {f"optimizer.{number}.{name}": value.clone() for name, value in entries.items()}
    return held


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def raising_at(stage: type, error: type[BaseException]) -> Any:
    def observe(event: object) -> None:
        if isinstance(event, stage):
            raise error("told to")

    return observe


def test_the_stages_that_an_observer_is_told_of_have_these_names():
    seen: list[str] = []
    make(network(), observer=lambda event: seen.append(type(event).__name__))(labelled())
    assert {"Zero", "Forward", "Backward", "Clip", "Step"} <= set(seen)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize(
    "stage", [stages.Zero, stages.Forward, stages.Backward, stages.Clip], ids=lambda kind: kind.__name__
)
@pytest.mark.parametrize("num_updates", [0, 2], ids=["first", "third"])
def test_an_error_before_the_step_changes_nothing_and_the_batch_can_be_given_again(stage, error, num_updates):
    update, twin = make(network()), make(network())
    for _ in range(num_updates):
        update(labelled())
        twin(labelled())
    before = state(update)
    update.observer = raising_at(stage, error)
    with pytest.raises(error):
        update(labelled())
    assert_same(state(update), before)
    update.observer = None
    assert update(labelled()).applied, "the scaler unscales again"
    twin(labelled())
    assert_same(state(update), state(twin))


def test_an_error_in_the_first_step_changes_nothing():
    update, twin = make(network()), make(network())
    before = state(update)
    for error in (ValueError, KeyboardInterrupt):
        update.optimizer.fails = error
        with pytest.raises(error):
            update(labelled())
        assert_same(state(update), before)
    update.optimizer.fails = None
    update(labelled())
    twin(labelled())
    assert_same(state(update), state(twin))


def test_one_in_a_later_step_says_that_weights_are_torn_and_leaves_buffers_and_scaler_as_they_were():
    update = make(network())
    for _ in range(2):  # the first two are copied, and put back
        update(labelled())
    buffers = [buffer.clone() for buffer in update.model.buffers()]
    update.optimizer.fails = ValueError
    with pytest.raises(ValueError, match="amid a step") as told:
        update(labelled())
    assert "some parameters may have been stepped and others not" in told.value.__notes__[0]
    assert all(map(torch.equal, buffers, update.model.buffers()))
    update.optimizer.fails = None
    assert update(labelled()).applied


class Interrupted(torch.optim.SGD):
    """Is sent Ctrl-C amid its step, as a user at a terminal would."""

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.add_(parameter.grad, alpha=-0.1)
                os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_amid_a_step_waits_until_all_of_the_update_is_done():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        model, twin = network(), network()
        optimizer = Interrupted(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        optimizer._opt_called = True
        update = make(model, optimizer, scheduler=scheduler, scaler=None, clip_norm=None)
        with pytest.raises(KeyboardInterrupt):
            update(labelled())
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        make(twin, torch.optim.SGD(twin.parameters(), lr=0.1), scaler=None, clip_norm=None)(labelled())
        assert_same(model.state_dict(), twin.state_dict())
        assert scheduler.get_last_lr() == [0.05]
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("on_empty", ["skip", "step"])
def test_a_batch_without_any_target_decays_weights_only_where_this_was_chosen(on_empty):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    update = make(model, optimizer, scheduler=scheduler, on_empty=on_empty)
    update(labelled())
    before, scale, lr = state(update), update.scaler.get_scale(), scheduler.get_last_lr()
    result = update((labelled()[0], torch.full((12,), -100)))
    assert (result.applied, result.units) == (on_empty == "step", 0)
    assert update.scaler.get_scale() == scale
    if on_empty == "skip":
        assert_same(state(update), before)
        assert scheduler.get_last_lr() == lr
    else:
        assert not torch.equal(model[0].weight, before["model.0.weight"])


def test_other_words_for_it_are_refused():
    with pytest.raises(UpdateError, match="on_empty='ignore': expected one of skip, step"):
        make(network(), on_empty="ignore")


class AcceleratedOptimizer(torch.optim.Optimizer):
    """As Accelerate's: it steps only where its own counter of micro-batches says so."""

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: Any = None) -> None:
        self.optimizer, self.scaler, self.counter = optimizer, scaler, 0

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> None:
        self.counter += 1
        if self.counter % 4 == 0:
            self.optimizer.step(closure)


class AcceleratedScheduler:
    """As Accelerate's: it steps once per process."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def step(self) -> None:
        for _ in range(2):
            self.scheduler.step()


def test_accelerates_prepared_optimizer_and_scheduler_step_once_per_update():
    model = nn.Linear(6, 3).double()
    wanted = copy.deepcopy(model)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
    update = make(
        model, AcceleratedOptimizer(inner), scheduler=AcceleratedScheduler(scheduler), scaler=None, clip_norm=None
    )
    lr = 0.1
    for _ in range(4):
        gradient = whole_batch_gradient(
            wanted, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), labelled()
        )
        with torch.no_grad():
            for parameter, part in zip(wanted.parameters(), gradient.split([18, 3]), strict=True):
                parameter -= lr * part.view(parameter.shape)
        lr /= 2
        assert update(labelled()).applied
        assert torch.allclose(model.weight, wanted.weight, rtol=0, atol=1e-12)
    assert scheduler.get_last_lr() == [lr]


def test_as_it_is_three_of_four_of_its_steps_do_nothing():
    model = nn.Linear(6, 3).double()
    optimizer = AcceleratedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    moved = []
    for _ in range(4):
        before = model.weight.detach().clone()
        F.cross_entropy(model(labelled()[0]), labelled()[1]).backward()
        optimizer.step()
        moved.append(not torch.equal(before, model.weight))
    assert moved == [False, False, False, True]


def test_a_loss_scale_inside_the_wrapper_is_asked_for_and_deepspeeds_wrapper_is_refused():
    model = nn.Linear(6, 3)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(UpdateError, match=r"AcceleratedOptimizer scales its loss.*scaler=accelerator\.scaler"):
        make(model, AcceleratedOptimizer(inner, scaler), scaler=None)
    make(model, AcceleratedOptimizer(inner, scaler), scaler=scaler)

    class DeepSpeedOptimizerWrapper(AcceleratedOptimizer):
        pass

    with pytest.raises(UpdateError, match=r"DeepSpeedOptimizerWrapper steps when DeepSpeed's engine says so"):
        make(model, DeepSpeedOptimizerWrapper(inner))


@pytest.mark.parametrize("loss", [lambda: info_nce(0.1, learned=True), clip_loss])
def test_a_learned_temperature_that_the_optimizer_does_not_hold_is_refused(loss):
    model = nn.Linear(6, 4)
    objective = Coupled(lambda model, x: (model(x), model(x + 1)), loss())
    update = Update(model, torch.optim.SGD(model.parameters(), lr=0.1), objective, micro_batch=4)
    with pytest.raises(
        UpdateError, match=r"'log_scale' of shape \(\), that the optimizer does not.*objective\.parameters\(\)"
    ):
        update(torch.randn(8, 6))
    assert all(parameter.grad is None for parameter in model.parameters())
    update.optimizer.add_param_group({"params": objective.parameters()})
    before = objective.loss.log_scale.detach().clone()
    assert Update(model, update.optimizer, objective, micro_batch=4)(torch.randn(8, 6)).applied
    assert not torch.equal(objective.loss.log_scale, before)


def test_a_frozen_one_is_not():
    model, objective = nn.Linear(6, 4), Coupled(lambda model, x: (model(x), model(x + 1)), clip_loss())
    objective.loss.log_scale.requires_grad_(False)
    assert Update(model, torch.optim.SGD(model.parameters(), lr=0.1), objective, micro_batch=4)(
        torch.randn(8, 6)
    ).applied

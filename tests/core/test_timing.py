"""A split that learns hears how long its micro-batches took; any other costs nothing."""

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from anybatch import Accumulator, Auto, MicroBatches, Objective, Rows, Tokens
from anybatch.core import cutting as timing


class Listening:
    """A split that writes down what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[MicroBatches, Sequence[float | None]]] = []

    def cut(self, batch: torch.Tensor) -> MicroBatches:
        return Rows(4).cut(batch)

    def learn(self, ran: MicroBatches, seconds: Sequence[float | None]) -> None:
        self.heard.append((ran, seconds))


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that moves by 1, 2, 3... seconds each time it is read."""
    now, step = 0.0, 0

    def tick() -> float:
        nonlocal now, step
        now, step = now + step, step + 1
        return now

    monkeypatch.setattr(timing, "perf_counter", tick)


def objective(units: object = len) -> Objective:
    return Objective(lambda model, part: model(part).square().mean(), units)


@pytest.mark.usefixtures("ticking")
def test_every_micro_batch_is_timed_from_the_end_of_the_one_before():
    split = Listening()
    Accumulator(nn.Linear(2, 1), objective(), micro_batch=split).backward(torch.randn(10, 2))
    [(ran, seconds)] = split.heard
    assert [len(part) for part in ran] == [4, 3, 3]
    assert seconds == [1.0, 2.0, 3.0]


@pytest.mark.usefixtures("ticking")
def test_a_micro_batch_that_does_not_run_has_no_time():
    split = Listening()
    units = objective(lambda part: 0 if len(part) == 4 else len(part))
    Accumulator(nn.Linear(2, 1), units, micro_batch=split).backward(torch.randn(10, 2))
    assert split.heard[0][1] == [None, 1.0, 2.0]


def test_a_batch_that_came_cut_teaches_nothing():
    split = Listening()
    Accumulator(nn.Linear(2, 1), objective(), micro_batch=split).backward(Rows(5).cut(torch.randn(10, 2)))
    assert split.heard == []


def test_a_batch_that_failed_teaches_nothing():
    def fails(model: nn.Module, part: torch.Tensor) -> torch.Tensor:
        if len(part) == 3:
            raise RuntimeError("out of luck")
        return model(part).mean()

    split = Listening()
    with pytest.raises(RuntimeError, match="out of luck"):
        Accumulator(nn.Linear(2, 1), Objective(fails), micro_batch=split).backward(torch.randn(10, 2))
    assert split.heard == []


def test_splits_that_do_not_learn_are_not_timed():
    def hooks(split: Rows | Tokens) -> tuple[object, ...]:
        return Accumulator(nn.Linear(2, 1), objective(), micro_batch=split).prepare(torch.zeros(4, 2))[2].hooks

    assert hooks(Rows(2)) == hooks(Tokens(2, length=lambda batch: torch.ones(4))) == ()
    (watch,) = hooks(Tokens(2, length=lambda batch: torch.ones(4), learn=True))
    assert isinstance(watch, timing.Stopwatch)
    assert Rows(2).learn is None
    assert Tokens(2, learn=True).learn is not None
    assert Auto().learn is not None


def test_on_a_device_events_are_read_once_at_the_end(monkeypatch):
    class Event:
        """Stands in for torch.Event: records in milliseconds, and knows who waited."""

        clock = 0
        waits = 0

        def __init__(self, device: torch.device, enable_timing: bool) -> None:
            assert enable_timing
            assert device.type == "cuda"

        def record(self) -> None:
            Event.clock += 500
            self.at = Event.clock

        def synchronize(self) -> None:
            Event.waits += 1

        def elapsed_time(self, end: "Event") -> float:
            return float(end.at - self.at)

    monkeypatch.setattr(torch, "Event", Event)
    split, ran = Listening(), Rows(2).cut(torch.zeros(5, 2))
    watch = timing.Stopwatch(split.learn, ran, torch.device("cuda"))
    for index in (0, 2):
        watch.after_pass(index, is_kept=True, reports=True)
    watch.finish()
    assert split.heard[0][1] == [0.5, None, 0.5]
    assert Event.waits == 1


def test_a_cost_learnt_in_training_is_in_seconds():
    split = Tokens(64, length=lambda batch: torch.arange(1, 33), learn=True)
    before = split.cost
    each = Objective(lambda model, part: model(part.unsqueeze(2)).square().mean(), units=torch.numel)
    accumulator = Accumulator(nn.Linear(1, 1), each, micro_batch=split)
    for _ in range(3):
        accumulator.backward(torch.randn(32, 32))
    assert split.cost != before
    assert 0 < split.cost.of(4, 16) < 10

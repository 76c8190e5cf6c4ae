"""The stages of an update as typed events and as names in the profiler."""

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from anybatch import Accumulator, Objective, Update, stages, supervised
from anybatch.core import SILENT, events_for
from tests.reference import gradient

ORDER_OF_A_MICRO_BATCH = ["load", "forward", "loss", "backward", "accumulate"]


def run(observer=None) -> tuple[nn.Module, list[stages.Event]]:
    torch.manual_seed(0)
    model, seen = nn.Linear(4, 2), []
    update = Update(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        supervised(nn.CrossEntropyLoss()),
        micro_batch=4,
        clip_norm=1.0,
        observer=observer or seen.append,
    )
    update((torch.randn(10, 4), torch.randint(0, 2, (10,))))
    return model, seen


def test_an_update_of_three_micro_batches_is_zero_three_times_five_stages_clip_and_step():
    _, seen = run()
    names = [event.stage for event in seen]
    assert names == ["zero", *ORDER_OF_A_MICRO_BATCH * 3, "clip", "step"]
    assert [event.micro_batch for event in seen] == [None, *[0] * 5, *[1] * 5, *[2] * 5, None, None]
    assert all(event.seconds >= 0 for event in seen)
    starts = [event.started for event in seen]
    assert starts == sorted(starts)


def test_events_carry_what_happened():
    model, seen = run()
    by_kind = {kind: [event for event in seen if isinstance(event, kind)] for kind in {type(event) for event in seen}}
    assert [tuple(event.batch[0].shape) for event in by_kind[stages.Load]] == [(4, 4), (3, 4), (3, 4)]
    assert [tuple(event.output.shape) for event in by_kind[stages.Forward]] == [(4, 2), (3, 2), (3, 2)]
    assert [event.share for event in by_kind[stages.Loss]] == [0.4, 0.3, 0.3]
    assert [event.units for event in by_kind[stages.Loss]] == [4, 3, 3]
    assert not any(event.loss.requires_grad for event in by_kind[stages.Loss])
    assert by_kind[stages.Clip][0].grad_norm > 0
    assert by_kind[stages.Step][0].applied
    assert by_kind[stages.Zero][0].parameters == tuple(model.parameters())


def test_the_gradient_can_be_watched_growing():
    norms = []

    def watch(event: stages.Event) -> None:
        if isinstance(event, stages.Accumulate):
            norms.append(float(gradient(event.parameters).norm()))
        if isinstance(event, stages.Zero):
            assert all(parameter.grad is None for parameter in event.parameters)

    model, _ = run(watch)
    assert len(norms) == 3
    assert len(set(norms)) == 3
    assert norms[-1] == pytest.approx(float(gradient(model.parameters()).norm()), rel=1e-6)


def test_an_objective_that_calls_its_model_twice_gives_two_forwards_and_one_loss():
    seen: list[stages.Event] = []
    objective = Objective(lambda model, x: (model(x) - model(-x)).square().mean())
    Accumulator(nn.Linear(2, 1), objective, micro_batch=4, observer=seen.append).backward(torch.randn(4, 2))
    assert [event.stage for event in seen] == ["load", "forward", "forward", "loss", "backward", "accumulate"]


def test_an_objective_that_never_calls_the_model_itself_has_a_forward_without_output():
    class Encoder(nn.Linear):
        def encode(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.weight)

    seen: list[stages.Event] = []
    objective = Objective(lambda model, x: model.encode(x).square().mean())
    Accumulator(Encoder(2, 1), objective, micro_batch=4, observer=seen.append).backward(torch.randn(4, 2))
    assert [event.stage for event in seen] == ORDER_OF_A_MICRO_BATCH
    assert seen[1].output is None


def test_a_model_compiled_in_place_is_not_hooked_and_not_compiled_again_and_again():
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    compiled, seen, model = CompileCounter(), [], nn.Linear(2, 1)
    model.compile(backend=compiled)
    objective = Objective(lambda model, x: model(x).square().mean())
    accumulator = Accumulator(model, objective, micro_batch=4, observer=seen.append)
    for rows in (4, 8, 11, 7):
        accumulator.backward(torch.randn(rows, 2))
    assert compiled.frame_count <= 3
    assert {event.stage for event in seen} == set(ORDER_OF_A_MICRO_BATCH)


def test_nobody_listening_means_silent_events_and_no_hooks():
    assert events_for(None) is SILENT
    model = nn.Linear(2, 1)
    hooks: list[int] = []
    objective = Objective(lambda model, x: (hooks.append(len(model._forward_hooks)), model(x).mean())[1])
    Accumulator(model, objective, micro_batch=2).backward(torch.randn(4, 2))
    assert hooks == [0, 0]


def test_hooks_are_gone_and_ranges_closed_after_an_exception():
    model = nn.Linear(2, 1)
    accumulator = Accumulator(
        model, Objective(lambda model, x: model(x) / 0 * None), micro_batch=2, observer=lambda event: None
    )
    with profile(activities=[ProfilerActivity.CPU]), pytest.raises(TypeError):
        accumulator.backward(torch.randn(4, 2))
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_the_stages_appear_by_name_in_the_profiler():
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        run(lambda event: None)
    counts = {event.key: event.count for event in profiled.key_averages() if event.key.startswith("anybatch.")}
    assert counts == {
        **{f"anybatch.{stage}": 3 for stage in ORDER_OF_A_MICRO_BATCH},
        "anybatch.zero": 1,
        "anybatch.clip": 1,
        "anybatch.step": 1,
    }

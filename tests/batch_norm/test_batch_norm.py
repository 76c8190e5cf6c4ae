"""BatchNorm when a batch is cut: exact over the whole batch, merged by micro-batch, or frozen; and the warning."""

import copy
import signal
import threading
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from anybatch import (
    Accumulator,
    BatchError,
    Coupled,
    LockstepError,
    MemoryLimitError,
    MicroBatches,
    NonFiniteError,
    Objective,
    Rows,
    Update,
    UpdateError,
    info_nce,
    stages,
    supervised,
)
from benchmarks.models import ResidualNet
from tests.reference import gradient, relative_error, whole_batch_gradient
from tests.setups import cross_entropy

SIZES = [[8] * 8, [20, 20, 20, 4], [1] * 64]


def images(rows: int = 64, side: int = 8) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(rows, 3, side, side), torch.randint(0, 10, (rows,))


def vectors(rows: int = 12, width: int = 6) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return 3 * torch.randn(rows, width, dtype=torch.float64) + 5, torch.randint(0, 3, (rows,))


def cut(batch: tuple[Tensor, Tensor], sizes: list[int]) -> MicroBatches:
    return MicroBatches(list(zip(*(column.split(sizes) for column in batch), strict=True)))


def at_once(model: nn.Module, batch: tuple[Tensor, Tensor]) -> nn.Module:
    """A copy with the gradient and the buffers that one pass over the whole batch leaves."""
    twin = copy.deepcopy(model)
    cross_entropy(twin, batch).backward()
    return twin


def accumulated(model: nn.Module, batch: Any, **options: Any) -> nn.Module:
    twin = copy.deepcopy(model)
    Accumulator(twin, supervised(nn.CrossEntropyLoss()), micro_batch=4, **options).backward(batch)
    return twin


def error(model: nn.Module, reference: nn.Module) -> float:
    return relative_error(model, gradient(reference.parameters()))


def buffers_differ(model: nn.Module, reference: nn.Module) -> float:
    pairs = zip(model.buffers(), reference.buffers(), strict=True)
    return max(float((mine.double() - other.double()).norm() / other.double().norm()) for mine, other in pairs)


@pytest.mark.parametrize("sizes", SIZES, ids=["8 x 8", "20 20 20 4", "64 x 1"])
def test_exact_gives_the_whole_batchs_gradient_and_running_statistics_through_20_batch_norms(sizes):
    torch.manual_seed(0)
    model, batch = ResidualNet(width=4), images()
    assert sum(isinstance(module, nn.BatchNorm2d) for module in model.modules()) == 20
    reference = at_once(model, batch)
    run = accumulated(model, cut(batch, sizes), batch_norm="exact")
    assert error(run, reference) <= 3e-6
    assert buffers_differ(run, reference) <= 1e-6
    precise = (batch[0].double(), batch[1])
    reference = at_once(model.double(), precise)
    run = accumulated(model, cut(precise, sizes), batch_norm="exact")
    assert error(run, reference) <= 1e-12
    assert buffers_differ(run, reference) <= 1e-12


def test_plain_accumulation_does_not():
    torch.manual_seed(0)
    model, batch = ResidualNet(width=4).double(), (images()[0].double(), images()[1])
    reference = at_once(model, batch)
    run = accumulated(model, cut(batch, [8] * 8), batch_norm="micro")
    assert error(run, reference) > 0.4
    plain = copy.deepcopy(model)
    for part in cut(batch, [8] * 8):
        (cross_entropy(plain, part) / 8).backward()
    assert error(run, plain) < 1e-12, "micro is what plain accumulation gives"
    assert buffers_differ(run, reference) < 0.2 < buffers_differ(plain, reference), "but for the running statistics"


class Zoo(nn.Module):
    """Branches, a loop, a shared layer, no affine, no running statistics, cumulative momentum, an eval layer."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(6, 8)
        self.left, self.right = nn.BatchNorm1d(8, affine=False), nn.BatchNorm1d(8, track_running_stats=False)
        self.loop = nn.Linear(8, 8)
        self.shared = nn.BatchNorm1d(8, momentum=None)
        self.settled = nn.BatchNorm1d(8).eval()
        self.sync = nn.SyncBatchNorm(8, momentum=0.3)
        self.sequence = nn.BatchNorm1d(2)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        x = self.left(x).tanh() + self.right(x.square())
        for _ in range(3):
            x = x + self.shared(self.loop(x)).sigmoid()
        x = self.settled(x)
        x = self.sequence(x.reshape(-1, 2, 4)).reshape(-1, 8)
        return self.head(self.sync(x).tanh())


@pytest.mark.parametrize("sizes", [[5, 4, 3], [1] * 12, [10, 1, 1]])
def test_exact_holds_for_every_kind_of_layer_in_branches_loops_and_beside_eval_layers(sizes):
    torch.manual_seed(0)
    model, batch = Zoo().double(), vectors()
    with torch.no_grad():
        model.settled.running_mean.normal_()
    for _ in range(2):  # the second time cumulative averages have something to average with
        reference = at_once(model, batch)
        run = accumulated(model, cut(batch, sizes), batch_norm="exact")
        assert error(run, reference) <= 1e-12
        assert buffers_differ(run, reference) <= 1e-12
        assert run.shared.num_batches_tracked == reference.shared.num_batches_tracked
        model = run
        model.zero_grad()


@pytest.mark.parametrize(("layer", "shape"), [(nn.BatchNorm2d, (3, 4)), (nn.BatchNorm3d, (2, 3, 2))])
def test_exact_holds_in_two_and_three_dimensions_in_any_memory_format(layer, shape):
    torch.manual_seed(0)
    model = nn.Sequential(layer(5), nn.Flatten(), nn.Linear(5 * torch.Size(shape).numel(), 3)).double()
    x = torch.randn(9, *shape, 5, dtype=torch.float64).movedim(-1, 1)
    batch = (x, torch.randint(0, 3, (9,)))
    run, reference = accumulated(model, cut(batch, [4, 4, 1]), batch_norm="exact"), at_once(model, batch)
    assert error(run, reference) <= 1e-13
    assert buffers_differ(run, reference) <= 1e-13


@settings(max_examples=20)
@given(sizes=st.lists(st.integers(1, 7), min_size=2, max_size=8), seed=st.integers(0, 100))
def test_exact_holds_for_any_cut_and_class_weights(sizes, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3), nn.BatchNorm1d(3)).double()
    batch = torch.randn(sum(sizes), 4).double(), torch.randint(0, 3, (sum(sizes),))
    weights = torch.tensor([0.1, 1.0, 7.0]).double()
    reference = whole_batch_gradient(
        model, lambda twin, whole: F.cross_entropy(twin(whole[0]), whole[1], weights), batch
    )
    accumulator = Accumulator(model, supervised(nn.CrossEntropyLoss(weights)), micro_batch=1, batch_norm="exact")
    accumulator.backward(cut(batch, sizes))
    assert relative_error(model, reference) <= 1e-8 or float(reference.norm()) < 1e-9


def test_dropout_draws_in_one_fixed_order_and_the_gradient_is_that_of_those_masks():
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.Dropout(0.4), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.4), nn.Linear(8, 8)]
    model = nn.Sequential(*layers, nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3)).double()
    batch, reference = vectors(), copy.deepcopy(model)
    torch.manual_seed(5)
    segments: list[list[nn.Module]] = [[]]
    for layer in reference:
        segments.append([layer, *([[]] * 0)]) if isinstance(layer, nn.BatchNorm1d) else segments[-1].append(layer)
    parts = list(batch[0].split([4, 4, 4]))
    for segment in segments:
        if isinstance(segment[0], nn.BatchNorm1d):
            parts = list(segment[0](torch.cat(parts)).split([4, 4, 4]))
            segment = segment[1:]
        parts = [nn.Sequential(*segment)(part) for part in parts]
    F.cross_entropy(torch.cat(parts), batch[1]).backward()
    runs = []
    for _ in range(2):
        torch.manual_seed(5)
        runs.append(accumulated(model, batch, batch_norm="exact"))
    assert error(runs[0], reference) <= 1e-13
    assert torch.equal(gradient(runs[0].parameters()), gradient(runs[1].parameters()))


def test_a_subclass_with_a_forward_of_its_own_is_pooled_too():
    class WithActivation(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).relu() * 2

    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(6, 8), WithActivation(8), nn.Linear(8, 3)).double(), vectors()
    assert error(accumulated(model, batch, batch_norm="exact"), at_once(model, batch)) <= 1e-13


def test_rows_without_a_target_count_in_the_statistics_and_not_in_the_loss():
    torch.manual_seed(0)
    model, (x, y) = Zoo().double(), vectors()
    y[4:8] = -100
    run = accumulated(model, (x, y), batch_norm="exact")
    assert error(run, at_once(model, (x, y))) <= 1e-12
    result = Accumulator(model, supervised(nn.CrossEntropyLoss()), micro_batch=4, batch_norm="exact").backward((x, y))
    assert result.units == 8
    y[:] = -100
    model.zero_grad()
    Accumulator(model, supervised(nn.CrossEntropyLoss()), micro_batch=4, batch_norm="exact").backward((x, y))
    assert not gradient(model.parameters()).any()


@pytest.mark.parametrize("is_ambient", [True, False])
def test_autocast_reaches_the_threads(is_ambient):
    torch.manual_seed(0)
    seen = set()
    model, batch = ResidualNet(width=4), images()
    reference = at_once(model, batch)
    with torch.autocast("cpu", torch.bfloat16):
        floor = error(at_once(model, batch), reference)
    model.head[2].register_forward_hook(
        lambda module, inputs, output: seen.add((output.dtype, threading.current_thread()))
    )
    with torch.autocast("cpu", torch.bfloat16, enabled=is_ambient):
        run = copy.deepcopy(model)
        own = None if is_ambient else torch.bfloat16
        Accumulator(run, supervised(nn.CrossEntropyLoss()), micro_batch=16, batch_norm="exact", autocast=own).backward(
            batch
        )
    assert {dtype for dtype, _ in seen} == {torch.bfloat16}
    assert threading.main_thread() not in {thread for _, thread in seen}
    assert error(run, reference) < 1.5 * floor, "as far off as the whole batch in bf16"
    assert buffers_differ(run, reference) < 3e-2


def test_grad_mode_default_device_and_num_threads_reach_the_threads():
    seen = []

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        seen.append((torch.is_grad_enabled(), torch.get_num_threads(), str(torch.zeros(1).device)))
        return model(x).square().mean()

    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    accumulator = Accumulator(model, Objective(loss), micro_batch=2, batch_norm="exact")
    with torch.device("meta"):
        accumulator.backward(torch.randn(4, 3, device="cpu"))
    assert seen == [(True, torch.get_num_threads(), "meta")] * 2
    with torch.no_grad(), pytest.raises(Exception, match="does not depend on any parameter"):
        accumulator.backward(torch.randn(4, 3))


class Fickle(nn.Module):
    """Breaks the rule in a way that the first value of its rows chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.BatchNorm1d(3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        way = int(x[0, 0])
        if way == 3:
            raise RuntimeError("a bad row")
        x = self.first(x) if way != 1 else self.second(x)
        return x if way == 2 else self.third(x)


@pytest.mark.parametrize(
    ("ways", "message"),
    [
        (
            [0, 0, 1],
            "micro-batch 2 meets BatchNorm 'second', where micro-batch 0 met BatchNorm 'first'.*same order.*'micro'",
        ),
        (
            [0, 2, 0],
            "micro-batch 1 finished its forward without meeting BatchNorm 'third', at which micro-batch 0 waits",
        ),
        ([2, 0, 0], "micro-batch 1 meets BatchNorm 'third', but micro-batch 0 finished its forward without it"),
        ([0, 3, 0], "a bad row"),
        ([3, 0, 0], "a bad row"),
        ([0, 0, 3], "a bad row"),
    ],
)
def test_a_forward_that_breaks_the_rule_or_fails_is_named_and_leaves_no_thread_and_the_gradients_as_they_were(
    ways, message
):
    model = nn.Sequential(nn.Linear(3, 3), Fickle())
    model[0].weight.data.copy_(torch.eye(3)), model[0].bias.data.zero_()
    x = torch.randn(9, 3)
    x[:, 0] = torch.tensor(ways).repeat_interleave(3) + 0.5
    model(torch.full((2, 3), 0.5)).sum().backward()
    before, threads = gradient(model.parameters()), threading.active_count()
    accumulator = Accumulator(
        model, Objective(lambda model, x: model(x).square().mean()), micro_batch=3, batch_norm="exact"
    )
    kind = RuntimeError if message == "a bad row" else LockstepError
    with pytest.raises(
        kind,
        match=message
        if kind is RuntimeError
        else message.replace("'f", "'1.f").replace("'s", "'1.s").replace("'t", "'1.t"),
    ):
        accumulator.backward(x)
    assert torch.equal(gradient(model.parameters()), before)
    assert threading.active_count() == threads
    assert not any("forward" in vars(module) for module in model.modules()), "the layers compute as before"
    accumulator.backward(torch.full((9, 3), 0.5) + torch.rand(9, 3) / 4)


def test_an_interrupt_of_the_waiting_thread_leaves_no_thread_behind():
    import _thread

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        _thread.interrupt_main()
        return model(x).mean()

    model, threads = nn.BatchNorm1d(3), threading.active_count()
    accumulator = Accumulator(model, Objective(loss), micro_batch=2, batch_norm="exact")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # under nohup it is ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            accumulator.backward(torch.randn(6, 3))
    finally:
        signal.signal(signal.SIGINT, before)
    assert threading.active_count() == threads


def test_a_thread_that_cannot_start_is_named_and_not_tried_again_in_smaller_micro_batches(monkeypatch):
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == "anybatch-lockstep-2":
            raise RuntimeError("can't start new thread")
        start(thread)

    model, threads = nn.BatchNorm1d(3), threading.active_count()
    accumulator = Accumulator(model, Objective(lambda model, x: model(x).mean()), micro_batch=2, batch_norm="exact")
    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(MemoryLimitError, match=r"runs each of 3 micro-batches in a thread .* Use larger micro-batches"):
        accumulator.backward(torch.randn(6, 3))
    assert threading.active_count() == threads
    assert accumulator.split == Rows(2)


def test_one_value_per_channel_in_the_whole_batch_is_refused():
    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x)

    with pytest.raises(
        BatchError, match=r"BatchNorm 'norm' got one value per channel \(input of shape \(1, 3\)\).*'exact'"
    ):
        Accumulator(Narrow(), Objective(lambda m, x: m(x).mean()), micro_batch=1, batch_norm="micro").backward(
            torch.randn(2, 3)
        )


def test_micro_merges_the_running_statistics_to_the_one_update_of_the_big_batch():
    torch.manual_seed(0)
    # before the first BatchNorm no statistics have been used, so there the merged update is exact
    model, batch = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, momentum=0.3), nn.Linear(8, 3)).double(), vectors()
    run, reference = accumulated(model, cut(batch, [6, 4, 2]), batch_norm="micro"), at_once(model, batch)
    assert buffers_differ(run, reference) <= 1e-14
    assert run[1].num_batches_tracked == 1
    plain = copy.deepcopy(model)
    for part in cut(batch, [6, 4, 2]):
        plain(part[0])
    assert buffers_differ(plain, reference) > 0.1, "three updates are not one"


def test_micro_counts_the_calls_of_a_shared_layer_and_cumulative_averages():
    torch.manual_seed(0)
    model, batch = Zoo().double(), vectors()
    run, reference = accumulated(model, batch, batch_norm="micro"), at_once(model, batch)
    assert run.shared.num_batches_tracked == reference.shared.num_batches_tracked == 3
    assert torch.allclose(run.left.running_mean, reference.left.running_mean, rtol=1e-12)


def test_frozen_normalises_by_running_statistics_and_leaves_them_alone():
    torch.manual_seed(0)
    model, batch = Zoo().double(), vectors()
    model.right = nn.BatchNorm1d(8).double()
    for _ in range(3):
        model(batch[0])
    model.zero_grad()
    settled = copy.deepcopy(model)
    for module in settled.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
    reference = at_once(settled, batch)
    for size in (4, 12):
        run = copy.deepcopy(model)
        Accumulator(run, supervised(nn.CrossEntropyLoss()), micro_batch=size, batch_norm="frozen").backward(batch)
        assert error(run, reference) <= 1e-13
        assert all(torch.equal(mine, before) for mine, before in zip(run.buffers(), model.buffers(), strict=True))
        assert run.left.training
    with pytest.raises(UpdateError, match=r"BatchNorm 'right' keeps no running statistics.*'exact' or 'micro'"):
        accumulated(Zoo().double(), batch, batch_norm="frozen")


def test_the_default_is_micro_with_one_warning_that_says_what_is_known_and_how_to_measure_the_rest():
    torch.manual_seed(0)
    model, batch = ResidualNet(width=4), images()
    plain = accumulated(model, cut(batch, [8] * 8), batch_norm="micro")
    run = copy.deepcopy(model)
    accumulator = Accumulator(run, supervised(nn.CrossEntropyLoss()), micro_batch=8)
    state = torch.get_rng_state()
    known = (
        r"20 BatchNorm layers.*8 micro-batches of at most 8 rows.*verify\(model, objective, batch\).*'exact'.*'micro'"
    )
    with pytest.warns(UserWarning, match=known) as caught:
        accumulator.backward(batch)
    assert caught[0].filename == __file__
    assert torch.equal(gradient(run.parameters()), gradient(plain.parameters()))
    assert buffers_differ(run, plain) == 0
    assert torch.equal(torch.get_rng_state(), state)
    accumulator.backward(batch)  # once is enough: a second warning would be an error here


def test_the_warning_takes_no_second_pass():
    torch.manual_seed(0)
    batch, calls = images(), []
    model = ResidualNet(width=4)
    model.register_forward_hook(lambda *_: calls.append(1))
    with pytest.warns(UserWarning, match="BatchNorm"):
        Accumulator(model, supervised(nn.CrossEntropyLoss()), micro_batch=8).backward(batch)
    assert len(calls) == 8


def test_the_warning_of_an_update_points_to_the_users_line():
    model = ResidualNet(width=4)
    update = Update(
        model, torch.optim.SGD(model.parameters(), lr=0.1), supervised(nn.CrossEntropyLoss()), micro_batch=8
    )
    with pytest.warns(UserWarning, match="BatchNorm") as caught:
        update(images())
    assert caught[0].filename == __file__


def test_who_chose_or_has_nothing_to_choose_is_not_warned():
    batch = vectors()
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for mode in ("micro", "exact", "frozen"):
            accumulated(model, batch, batch_norm=mode)
        accumulated(model, cut(batch, [12]))
        accumulated(copy.deepcopy(model).eval(), batch)


@pytest.mark.parametrize("mode", ["exact", "micro", "frozen", None])
def test_a_coupled_loss_over_an_encoder_with_batch_norm(mode):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 4)).double()
    pair = torch.randn(12, 6).double(), torch.randn(12, 6).double()
    coupled = Coupled(lambda model, part: (model(part[0]), model(part[1])), info_nce(0.2))
    if mode == "exact":
        model[2].eval()
    reference = copy.deepcopy(model)
    if mode == "frozen":
        reference[1].eval()
    torch.manual_seed(3)
    if mode == "exact":
        coupled.loss(coupled.encode(reference, pair)).backward()
    else:
        parts = [coupled.encode(reference, part) for part in zip(*(column.split(4) for column in pair), strict=True)]
        coupled.loss([torch.cat(column) for column in zip(*parts, strict=True)]).backward()
    accumulator = Accumulator(model, coupled, micro_batch=4, batch_norm=mode)
    torch.manual_seed(3)
    if mode is None:
        with pytest.warns(UserWarning, match="batch_norm='exact'"):
            accumulator.backward(pair)
    else:
        accumulator.backward(pair)
    assert error(model, reference) <= 1e-13
    assert model[1].num_batches_tracked == (0 if mode == "frozen" else 2)
    if mode == "exact":
        assert buffers_differ(model, reference) <= 1e-13


def test_exact_works_with_a_scaler_clipping_metrics_and_an_update():
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)), vectors()
    batch = batch[0].float(), batch[1]
    twin = at_once(model, batch)
    norm = nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
    torch.optim.SGD(twin.parameters(), lr=0.5).step()
    update = Update(
        model,
        torch.optim.SGD(model.parameters(), lr=0.5),
        supervised(
            nn.CrossEntropyLoss(), metrics=lambda output, target: {"right": (output.argmax(1) == target).float().mean()}
        ),
        micro_batch=5,
        batch_norm="exact",
        clip_norm=0.1,
        scaler=torch.amp.GradScaler("cpu", init_scale=2.0**12),
    )
    result = update(batch)
    assert float(result.grad_norm) == pytest.approx(float(norm), rel=1e-5)
    assert float(result.metrics["right"] * 12) == pytest.approx(round(float(result.metrics["right"] * 12)), abs=1e-4)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert buffers_differ(model, twin) < 1e-6


@pytest.mark.parametrize("spoilt", [float("nan"), float("inf")])
def test_a_micro_batch_that_is_not_finite_is_dropped_and_spoils_no_statistics(spoilt):
    torch.manual_seed(0)
    model, (x, y) = Zoo().double(), vectors()
    reference = at_once(model, (torch.cat([x[:4], x[8:]]), torch.cat([y[:4], y[8:]])))
    x[5, 1] = spoilt
    run = copy.deepcopy(model)
    accumulator = Accumulator(
        run, supervised(nn.CrossEntropyLoss()), micro_batch=4, batch_norm="exact", drop_nonfinite=True
    )
    result = accumulator.backward((x, y))
    assert (result.dropped, result.units) == ((1,), 8)
    assert error(run, reference) <= 1e-12
    assert buffers_differ(run, reference) <= 1e-12


def test_raise_names_the_micro_batch_of_a_single_row_and_puts_the_statistics_back():
    model, (x, y) = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double(), vectors()
    x[7] = float("nan")
    before = copy.deepcopy(model.state_dict())
    settings = {"micro_batch": 1, "batch_norm": "exact"}
    update = Update(model, torch.optim.SGD(model.parameters(), lr=0.1), supervised(nn.CrossEntropyLoss()), **settings)
    with pytest.raises(NonFiniteError, match="first in micro-batch 7 of 12"):
        update((x, y))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_events_of_lockstep_are_one_forward_and_one_backward_for_all():
    seen: list[stages.Event] = []
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
    accumulated(model, vectors(), batch_norm="exact", observer=seen.append)
    assert [event.stage for event in seen] == ["load"] * 3 + ["forward"] + ["loss"] * 3 + ["backward", "accumulate"]
    losses = [event for event in seen if isinstance(event, stages.Loss)]
    assert [event.micro_batch for event in losses] == [0, 1, 2]
    assert sum(event.share for event in losses) == pytest.approx(1)


def test_a_forward_compiled_around_batch_norm_layers_is_refused_and_one_compiled_between_them_is_not():
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double(), vectors()
    reference = at_once(model, batch)
    compiled = torch.compile(copy.deepcopy(model), backend="eager")
    accumulator = Accumulator(compiled, supervised(nn.CrossEntropyLoss()), micro_batch=4, batch_norm="exact")
    with pytest.raises(UpdateError, match=r"the model is compiled around BatchNorm layers.*'micro'"):
        accumulator.backward(batch)
    model[2].compile(backend="eager")
    assert error(accumulated(model, batch, batch_norm="exact"), reference) <= 1e-13


@pytest.mark.parametrize("options", [{"batch_norm": "Exact"}, {"offload": "cloud"}])
def test_unknown_choices_are_refused(options):
    ((name, value),) = options.items()
    with pytest.raises(UpdateError, match=f"{name}='{value}': expected"):
        Accumulator(nn.Linear(1, 1), supervised(nn.CrossEntropyLoss()), micro_batch=1, **options)

"""Accumulator: the whole batch's gradient, by default and without the user counting anything."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch import Accumulator, LossError, Mean, Objective, Rows, Sum, UnitsError, supervised, windows
from benchmarks.models import TokenModel
from tests.reference import gradient, mean_of_means, relative_error, whole_batch_gradient

EXACT_FP32 = 5e-7


def ragged_tokens(rows: int = 32) -> tuple[Tensor, Tensor]:
    """Rows of log-normal length, padded; padding is ignored in the targets."""
    lengths = torch.empty(rows).log_normal_(2.5, 1.0).clamp(2, 80).long()
    tokens = torch.randint(0, 50, (rows, int(lengths.max())))
    targets = torch.randint(0, 50, tokens.shape)
    targets[torch.arange(tokens.shape[1]) >= lengths[:, None]] = -100
    return tokens, targets


def tokens_case() -> tuple[nn.Module, nn.Module, Any, int]:
    torch.manual_seed(0)
    return TokenModel(), nn.CrossEntropyLoss(), ragged_tokens(), 4


def class_weights_case() -> tuple[nn.Module, nn.Module, Any, int]:
    torch.manual_seed(0)
    labels = torch.multinomial(torch.tensor([0.6, 0.35, 0.05]), 64, replacement=True)
    return nn.Linear(10, 3), nn.CrossEntropyLoss(torch.tensor([0.2, 1.0, 20.0])), (torch.randn(64, 10), labels), 8


def tail_case() -> tuple[nn.Module, nn.Module, Any, int]:
    torch.manual_seed(0)
    x = torch.randn(40, 10)
    return nn.Linear(10, 2), nn.CrossEntropyLoss(), (x, (x.sum(1) > 0).long()), 16


@pytest.mark.parametrize("case", [tokens_case, class_weights_case, tail_case])
def test_the_accumulated_gradient_is_the_whole_batchs(case):
    model, criterion, batch, micro_batch = case()
    reference = whole_batch_gradient(
        model, lambda twin, whole: type(criterion)(_double(criterion.weight))(twin(whole[0]), whole[1]), batch
    )
    accumulated = Accumulator(model, supervised(criterion), micro_batch=micro_batch).backward(batch)
    assert relative_error(model, reference) < EXACT_FP32
    assert accumulated.micro_batches == -(-len(batch[0]) // micro_batch)


def _double(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.double()


@pytest.mark.parametrize("case", [tokens_case, class_weights_case, tail_case])
def test_the_mean_of_means_is_not(case):
    model, criterion, batch, micro_batch = case()
    reference = whole_batch_gradient(
        model, lambda twin, whole: type(criterion)(_double(criterion.weight))(twin(whole[0]), whole[1]), batch
    )
    # 40 rows by 16 as a loader cuts them: 16, 16, 8, divided by the 4 that a full window has
    parts = list(zip(batch[0].split(micro_batch), batch[1].split(micro_batch), strict=True))
    mean_of_means(model, lambda twin, part: criterion(twin(part[0]), part[1]), parts)
    if case is tail_case:
        for parameter in model.parameters():
            parameter.grad *= 3 / 4
    assert relative_error(model, reference) > 0.1


def test_gradients_are_added_to_not_replaced():
    model, criterion, batch, _ = tail_case()
    accumulator = Accumulator(model, supervised(criterion), micro_batch=16)
    accumulator.backward(batch)
    once = gradient(model.parameters())
    accumulator.backward(batch)
    assert torch.allclose(gradient(model.parameters()), 2 * once, rtol=1e-6)


def test_a_micro_batch_with_no_target_neither_counts_nor_makes_the_loss_nan():
    torch.manual_seed(0)
    model, criterion = nn.Linear(5, 3), nn.CrossEntropyLoss()
    x, y = torch.randn(12, 5), torch.randint(0, 3, (12,))
    y[4:8] = -100
    reference = whole_batch_gradient(model, lambda twin, whole: F.cross_entropy(twin(whole[0]), whole[1]), (x, y))
    accumulated = Accumulator(model, supervised(criterion), micro_batch=4).backward((x, y))
    assert relative_error(model, reference) < EXACT_FP32
    assert float(accumulated.loss) == pytest.approx(float(criterion(model(x), y).detach()), rel=1e-6)
    assert accumulated.units == 8


def test_a_batch_of_no_units_leaves_zero_gradients_not_nan():
    model = nn.Linear(5, 3)
    batch = (torch.randn(6, 5), torch.full((6,), -100))
    accumulated = Accumulator(model, supervised(nn.CrossEntropyLoss()), micro_batch=2).backward(batch)
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())
    assert (float(accumulated.loss), accumulated.units) == (0.0, 0)


def test_a_mean_over_nothing_that_is_nan_in_backward_too_leaves_zeros():
    model = nn.Linear(5, 1)
    masked = Objective(
        lambda model, part: (model(part[0])[:, 0] * part[1]).sum() / part[1].sum(), units=lambda part: part[1].sum()
    )
    Accumulator(model, masked, micro_batch=2).backward((torch.randn(6, 5), torch.zeros(6)))
    assert not gradient(model.parameters()).any()
    plain = nn.Linear(5, 1)
    masked.loss(plain, (torch.randn(2, 5), torch.zeros(2))).backward()
    assert gradient(plain.parameters()).isnan().any(), "the plain backward is nan"


def test_a_batch_already_cut_is_exact_whatever_the_lengths_of_its_parts():
    model, criterion, (x, y), _ = tail_case()
    reference = whole_batch_gradient(model, lambda twin, whole: F.cross_entropy(twin(whole[0]), whole[1]), (x, y))
    loader = list(zip(x.split([16, 16, 8]), y.split([16, 16, 8]), strict=True))
    (batch,) = windows(loader, 4)
    accumulated = Accumulator(model, supervised(criterion), micro_batch=16).backward(batch)
    assert relative_error(model, reference) < EXACT_FP32
    assert (accumulated.units, accumulated.micro_batches) == (40, 3)


def test_an_exception_half_way_leaves_the_gradients_as_they_were():
    model, calls = nn.Linear(2, 1), []

    def fails_at_the_third(model: nn.Module, part: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("a bad row")
        return model(part).mean()

    accumulator = Accumulator(model, Objective(fails_at_the_third), micro_batch=2)
    model(torch.ones(1, 2)).sum().backward()
    before = gradient(model.parameters()).clone()
    with pytest.raises(RuntimeError, match="a bad row"):
        accumulator.backward(torch.randn(8, 2))
    assert torch.equal(gradient(model.parameters()), before)


def test_metrics_come_out_right_for_the_whole_batch():
    torch.manual_seed(0)
    model, x, y = nn.Linear(4, 3), torch.randn(11, 4), torch.randint(0, 3, (11,))
    y[:3] = -100

    def loss(model: nn.Module, part: Any) -> tuple[Tensor, dict[str, Any]]:
        logits, target = model(part[0]), part[1]
        counted = target != -100
        correct = (logits.argmax(1) == target)[counted]
        return F.cross_entropy(logits, target), {
            "accuracy": correct.float().mean(),
            "correct": Sum(correct.sum()),
            "largest per row": Mean(logits.amax(1).mean(), units=len(target)),
        }

    objective = Objective(loss, units=lambda part: (part[1] != -100).sum())
    metrics = Accumulator(model, objective, micro_batch=4).backward((x, y)).metrics
    correct = (model(x).argmax(1) == y)[3:]
    assert float(metrics["accuracy"]) == pytest.approx(float(correct.float().mean()))
    assert float(metrics["correct"]) == int(correct.sum())
    assert float(metrics["largest per row"]) == pytest.approx(float(model(x).detach().amax(1).mean()), rel=1e-6)
    means = [
        float((model(part).argmax(1) == target).float().mean()) for part, target in [(x[3:4], y[3:4]), (x[4:], y[4:])]
    ]
    assert sum(means) / 2 != pytest.approx(float(correct.float().mean())), "the mean of means is another number"


def test_sums_count_the_rows_of_micro_batches_without_a_target_too():
    model, y = nn.Linear(4, 2), torch.tensor([-100, -100, 0, 1])

    def loss(model: nn.Module, part: Any) -> tuple[Tensor, dict[str, Any]]:
        return F.cross_entropy(model(part[0]), part[1]), {"rows": Sum(len(part[1])), "same": 2.0}

    objective = Objective(loss, units=lambda part: (part[1] != -100).sum())
    for micro_batch in (4, 2, 1):
        metrics = Accumulator(model, objective, micro_batch=micro_batch).backward((torch.randn(4, 4), y)).metrics
        assert (float(metrics["rows"]), float(metrics["same"])) == (4.0, 2.0)


def test_metrics_do_not_keep_graphs_alive():
    import weakref

    alive: list[weakref.ref[Tensor]] = []

    def loss(model: nn.Module, part: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        assert not any(reference() is not None for reference in alive)
        output = model(part)
        side = output.abs()
        alive.append(weakref.ref(side))
        return output.square().mean(), {"size": side.mean()}

    Accumulator(nn.Linear(3, 2), Objective(loss), micro_batch=2).backward(torch.randn(8, 3))


def test_large_counts_stay_whole():
    objective = Objective(lambda model, part: (model(part).mean(), {"seen": Sum(torch.tensor(16_777_217))}))
    metrics = Accumulator(nn.Linear(3, 1), objective, micro_batch=4).backward(torch.randn(4, 3)).metrics
    assert metrics["seen"].item() == 16_777_217


@pytest.mark.parametrize(
    ("metric", "message"),
    [("x", "metric 'a' is a str: 'x'"), (torch.ones(3), r"metric 'a' has shape \(3,\); expected one number")],
)
def test_a_metric_that_is_no_number_is_refused_and_the_gradients_are_as_before(metric, message):
    model = nn.Linear(3, 1)
    objective = Objective(lambda model, part: (model(part).mean(), {"a": metric}))
    with pytest.raises(LossError, match=message):
        Accumulator(model, objective, micro_batch=2).backward(torch.randn(6, 3))
    assert model.weight.grad is None


def test_sparse_gradients_may_be_followed_by_dense_ones():
    model = nn.Embedding(5, 2, sparse=True)
    model(torch.tensor([1])).sum().backward()
    dense = Objective(lambda model, part: (part @ model.weight).mean())
    Accumulator(model, dense, micro_batch=2).backward(torch.ones(4, 5))
    assert model.weight.grad.tolist() == [[0.5, 0.5], [1.5, 1.5], [0.5, 0.5], [0.5, 0.5], [0.5, 0.5]]


def test_supervised_reports_metrics_of_outputs_and_targets():
    model, criterion, batch, _ = tail_case()
    objective = supervised(
        criterion, metrics=lambda output, target: {"accuracy": (output.argmax(1) == target).float().mean()}
    )
    metrics = Accumulator(model, objective, micro_batch=16).backward(batch).metrics
    expected = (model(batch[0]).argmax(1) == batch[1]).float().mean()
    assert float(metrics["accuracy"]) == pytest.approx(float(expected))


def test_autocast_covers_the_forward_and_gradients_stay_close():
    model, criterion, batch, _ = tail_case()
    reference = whole_batch_gradient(model, lambda twin, whole: F.cross_entropy(twin(whole[0]), whole[1]), batch)
    seen = []
    model.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    for autocast in (torch.bfloat16, torch.autocast("cpu", dtype=torch.bfloat16)):
        model.zero_grad()
        Accumulator(model, supervised(criterion), micro_batch=16, autocast=autocast).backward(batch)
        assert relative_error(model, reference) < 1e-2
    assert set(seen) == {torch.bfloat16}


def test_micro_batches_are_brought_to_the_models_device_one_at_a_time():
    model, seen = nn.Linear(3, 1, device="meta"), []

    def loss(model: nn.Module, part: tuple[Tensor, Tensor]) -> Tensor:
        seen.append({tensor.device.type for tensor in part})
        return F.mse_loss(model(part[0]), part[1])

    Accumulator(model, Objective(loss), micro_batch=2).backward((torch.randn(4, 3), torch.randn(4, 1)))
    assert seen == [{"meta"}, {"meta"}]


def test_sparse_gradients_add_up():
    torch.manual_seed(0)
    model = nn.Embedding(20, 4, sparse=True).double()
    batch = (torch.randint(0, 20, (13, 5)), torch.randn(13, 5, 4).double())
    dense = nn.Embedding.from_pretrained(model.weight.detach().clone(), freeze=False)
    F.mse_loss(dense(batch[0]), batch[1]).backward()
    Accumulator(model, supervised(nn.MSELoss()), micro_batch=4).backward(batch)
    assert model.weight.grad.is_sparse
    assert torch.allclose(model.weight.grad.to_dense(), dense.weight.grad, atol=1e-14)


def test_a_lbfgs_step_through_closures_is_that_of_the_whole_batch():
    torch.manual_seed(0)
    model = nn.Linear(5, 1).double()
    twin = nn.Linear(5, 1).double()
    twin.load_state_dict(model.state_dict())
    batch = (torch.randn(30, 5).double(), torch.randn(30, 1).double())
    settings = {"lr": 0.5, "max_iter": 10, "line_search_fn": "strong_wolfe"}
    optimizer, reference = (
        torch.optim.LBFGS(model.parameters(), **settings),
        torch.optim.LBFGS(twin.parameters(), **settings),
    )
    accumulator = Accumulator(model, supervised(nn.MSELoss()), micro_batch=7)

    def closure() -> Tensor:
        optimizer.zero_grad()
        return accumulator.backward(batch).loss

    def whole_closure() -> Tensor:
        reference.zero_grad()
        loss = F.mse_loss(twin(batch[0]), batch[1])
        loss.backward()
        return loss

    optimizer.step(closure)
    reference.step(whole_closure)
    assert torch.allclose(model.weight, twin.weight, rtol=1e-9)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda model, part: model(part).mean().item(), r"returned float.*without \.item\(\)"),
        (lambda model, part: (model(part).mean(), model(part)), r"\(loss, Tensor\); expected \(loss, metrics\)"),
        (lambda model, part: {"loss": model(part).mean()}, "returned dict"),
        (lambda model, part: model(part).square(), r"shape \(2, 1\); expected one number"),
        (lambda model, part: model(part).mean().detach(), "does not depend on any parameter"),
    ],
)
def test_a_loss_that_is_not_one_differentiable_number_is_refused_with_the_fix(loss, message):
    with pytest.raises(LossError, match=message):
        Accumulator(nn.Linear(3, 1), Objective(loss), micro_batch=2).backward(torch.randn(4, 3))


@pytest.mark.parametrize("units", [-1, float("nan"), float("inf")])
def test_units_that_make_no_sense_are_refused_with_the_micro_batch(units):
    objective = Objective(lambda model, part: model(part).mean(), units=lambda part: units)
    with pytest.raises(UnitsError, match=rf"micro-batch 0 has {units} units"):
        Accumulator(nn.Linear(3, 1), objective, micro_batch=2).backward(torch.randn(4, 3))


def test_units_that_are_no_single_number_are_refused():
    objective = Objective(lambda model, part: model(part).mean(), units=lambda part: part)
    with pytest.raises(UnitsError, match=r"shape \(2, 3\).*one number"):
        Accumulator(nn.Linear(3, 1), objective, micro_batch=2).backward(torch.randn(4, 3))


def test_units_that_are_nothing_are_refused():
    objective = Objective(lambda model, part: model(part).mean(), units=lambda part: None)
    with pytest.raises(UnitsError, match="returned a NoneType: None; expected one number"):
        Accumulator(nn.Linear(3, 1), objective, micro_batch=2).backward(torch.randn(4, 3))


def test_a_criterion_in_place_of_an_objective_is_refused_with_the_fix():
    with pytest.raises(LossError, match=r"is a CrossEntropyLoss; expected an Objective.*supervised\(criterion\)"):
        Accumulator(nn.Linear(1, 1), nn.CrossEntropyLoss(), micro_batch=2)


def test_only_one_graph_is_alive_at_a_time():
    import weakref

    graphs: list[weakref.ref[Tensor]] = []

    def loss(model: nn.Module, part: Tensor) -> Tensor:
        assert all(graph() is None for graph in graphs), "the last micro-batch's output is still alive"
        output = model(part)
        graphs.append(weakref.ref(output))
        return output.square().mean()

    Accumulator(nn.Linear(3, 2), Objective(loss), micro_batch=Rows(2)).backward(torch.randn(8, 3))
    assert len(graphs) == 4

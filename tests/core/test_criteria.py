"""supervised(): the units of every mean-reducing criterion of torch, against the whole batch at once in float64."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import loss as torch_losses

from anybatch import Accumulator, BatchError, LossError, Objective, UnitsError, rows, supervised
from anybatch.core.criteria import RULES
from tests.reference import gradient, mean_of_means, relative_error, whole_batch_gradient

ROWS, FEATURES, CLASSES = 23, 6, 5
CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 20.0, 0.5, 3.0], dtype=torch.float64)


class Head(nn.Module):
    """A linear layer whose output is put into the shape that a criterion wants."""

    def __init__(self, width: int, shape: Callable[[Tensor], Any] = lambda output: output) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, width)
        self.shape = shape

    def forward(self, *inputs: Tensor) -> Any:
        outputs = [self.linear(part) for part in inputs]
        return self.shape(*outputs)


class Case(NamedTuple):
    criterion: nn.Module
    head: Head
    batch: tuple[Any, ...]
    loss: Callable[[nn.Module, Any], Tensor] | None = None


def labels(*shape: int, ignored: int | None = None) -> Tensor:
    """Class labels whose classes and ignored entries are spread unevenly over the rows."""
    drawn = torch.randint(0, CLASSES, (ROWS, *shape))
    drawn[: ROWS // 3] = 2
    if ignored is not None:
        drawn[torch.rand(drawn.shape) < torch.linspace(0, 0.9, ROWS).reshape(-1, *[1] * len(shape))] = ignored
    return drawn


def cases() -> dict[str, Case]:
    torch.manual_seed(0)
    x = torch.randn(ROWS, FEATURES)
    real, positive, signs = torch.randn(ROWS, 3), torch.rand(ROWS, 3), torch.randint(0, 2, (ROWS, 3)) * 2.0 - 1
    log_probabilities = functools.partial(F.log_softmax, dim=1)
    grid = lambda output: output.reshape(-1, CLASSES, 2, 3)  # noqa: E731
    row_signs = torch.randint(0, 2, (ROWS,)) * 2 - 1
    lengths = torch.randint(1, 4, (ROWS,))
    ctc = lambda output: F.log_softmax(output.reshape(-1, 8, CLASSES), dim=2).transpose(0, 1)  # noqa: E731
    multi_label = torch.stack([torch.randperm(CLASSES) for _ in range(ROWS)])
    multi_label[:, 3] = -1
    distribution = torch.rand(ROWS, CLASSES).softmax(1)
    found = {
        "cross entropy": Case(nn.CrossEntropyLoss(), Head(CLASSES), (x, labels())),
        "cross entropy, ignored": Case(nn.CrossEntropyLoss(), Head(CLASSES), (x, labels(ignored=-100))),
        "cross entropy, ignore_index=3": Case(
            nn.CrossEntropyLoss(ignore_index=3), Head(CLASSES), (x, labels(ignored=3))
        ),
        "cross entropy, weights": Case(nn.CrossEntropyLoss(CLASS_WEIGHTS), Head(CLASSES), (x, labels())),
        "cross entropy, weights and ignored": Case(
            nn.CrossEntropyLoss(CLASS_WEIGHTS, ignore_index=1), Head(CLASSES), (x, labels(ignored=1))
        ),
        "cross entropy, smoothing": Case(
            nn.CrossEntropyLoss(label_smoothing=0.1), Head(CLASSES), (x, labels(ignored=-100))
        ),
        "cross entropy, smoothing and weights": Case(
            nn.CrossEntropyLoss(CLASS_WEIGHTS, ignore_index=0, label_smoothing=0.1),
            Head(CLASSES),
            (x, labels(ignored=0)),
        ),
        "cross entropy, probabilities": Case(nn.CrossEntropyLoss(), Head(CLASSES), (x, distribution)),
        "cross entropy, probabilities, weights and smoothing": Case(
            nn.CrossEntropyLoss(CLASS_WEIGHTS, label_smoothing=0.2), Head(CLASSES), (x, distribution)
        ),
        "cross entropy, grid": Case(
            nn.CrossEntropyLoss(CLASS_WEIGHTS), Head(CLASSES * 6, grid), (x, labels(2, 3, ignored=-100))
        ),
        "cross entropy, probabilities on a grid": Case(
            nn.CrossEntropyLoss(), Head(CLASSES * 6, grid), (x, torch.rand(ROWS, CLASSES, 2, 3))
        ),
        "linear cross entropy": Case(
            nn.LinearCrossEntropyLoss(FEATURES, CLASSES, ignore_index=4).double(),
            Head(FEATURES),
            (x, labels(ignored=4)),
        ),
        "nll": Case(nn.NLLLoss(CLASS_WEIGHTS), Head(CLASSES, log_probabilities), (x, labels(ignored=-100))),
        "l1": Case(nn.L1Loss(), Head(3), (x, real)),
        "mse": Case(nn.MSELoss(), Head(3), (x, real)),
        "smooth l1": Case(nn.SmoothL1Loss(), Head(3), (x, real)),
        "huber": Case(nn.HuberLoss(delta=0.3), Head(3), (x, real)),
        "bce": Case(nn.BCELoss(torch.tensor([1.0, 5.0, 0.1])), Head(3, torch.sigmoid), (x, positive)),
        "bce with logits": Case(
            nn.BCEWithLogitsLoss(torch.tensor([1.0, 5.0, 0.1]), pos_weight=torch.tensor([2.0, 1.0, 9.0])),
            Head(3),
            (x, positive),
        ),
        "poisson": Case(nn.PoissonNLLLoss(), Head(3), (x, positive * 4)),
        "gaussian nll": Case(
            nn.GaussianNLLLoss(), Head(6, lambda output: (output[:, :3], output[:, 3:].exp())), (x, real)
        ),
        "kl, mean": Case(nn.KLDivLoss(reduction="mean"), Head(CLASSES, log_probabilities), (x, distribution)),
        "kl, batchmean": Case(nn.KLDivLoss(reduction="batchmean"), Head(CLASSES, log_probabilities), (x, distribution)),
        "hinge embedding": Case(nn.HingeEmbeddingLoss(), Head(3), (x, signs)),
        "soft margin": Case(nn.SoftMarginLoss(), Head(3), (x, signs)),
        "multi margin": Case(nn.MultiMarginLoss(weight=CLASS_WEIGHTS), Head(CLASSES), (x, labels())),
        "multi-label margin": Case(nn.MultiLabelMarginLoss(), Head(CLASSES), (x, multi_label)),
        "multi-label soft margin": Case(nn.MultiLabelSoftMarginLoss(), Head(3), (x, (signs > 0).double())),
        "margin ranking": Case(
            nn.MarginRankingLoss(0.5), Head(1, lambda a, b: (a[:, 0], b[:, 0])), ((x, x.flip(0)), row_signs)
        ),
        "cosine embedding": Case(
            nn.CosineEmbeddingLoss(0.2), Head(4, lambda a, b: (a, b)), ((x, x.flip(0)), row_signs)
        ),
        "triplet": Case(nn.TripletMarginLoss(), Head(4, lambda a, b, c: (a, b, c)), ((x, x.flip(0), x.roll(3, 0)),)),
        "triplet with distance": Case(
            nn.TripletMarginWithDistanceLoss(swap=True),
            Head(4, lambda a, b, c: (a, b, c)),
            ((x, x.flip(0), x.roll(3, 0)), None),
        ),
        "ctc": Case(
            nn.CTCLoss(),
            Head(8 * CLASSES, ctc),
            (x, torch.randint(1, CLASSES, (ROWS, 3)), torch.full((ROWS,), 8), lengths),
        ),
    }
    with pytest.warns(FutureWarning):
        found["nll 2d"] = Case(
            nn.NLLLoss2d(), Head(CLASSES * 6, lambda out: F.log_softmax(grid(out), 1)), (x, labels(2, 3, ignored=-100))
        )
    return found


CASES = cases()


def whole_loss(case: Case, criterion: nn.Module) -> Callable[[nn.Module, Any], Tensor]:
    """The loss written out by hand, in the argument order that torch documents."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        inputs, *targets = batch
        outputs = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
        if isinstance(criterion, nn.GaussianNLLLoss):
            return criterion(outputs[0], targets[0], outputs[1])
        given = [target for target in targets if target is not None]
        return criterion(*(outputs if isinstance(outputs, tuple) else (outputs,)), *given)

    return loss


def double_case(case: Case) -> tuple[nn.Module, nn.Module, Any]:
    from tests.reference import doubled

    return case.head.double(), case.criterion.double(), doubled(case.batch)


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning")  # torch's advice on KLDivLoss('mean')
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("micro_batch", [1, 5, 23])
def test_the_accumulated_gradient_is_the_whole_batchs(name, micro_batch):
    model, criterion, batch = double_case(CASES[name])
    reference = whole_batch_gradient(model, whole_loss(CASES[name], criterion), batch)
    model.zero_grad()
    accumulated = Accumulator(model, supervised(criterion), micro_batch=micro_batch).backward(batch)
    assert relative_error(model, reference) < 1e-12
    with torch.no_grad():
        assert float(accumulated.loss) == pytest.approx(
            float(whole_loss(CASES[name], criterion)(model, batch)), rel=1e-12
        )


@pytest.mark.parametrize(
    "name", [name for name in CASES if "ignore" in name or ("weights" in name and "prob" not in name)]
)
def test_the_mean_of_means_is_not(name):
    model, criterion, batch = double_case(CASES[name])
    loss = whole_loss(CASES[name], criterion)
    reference = whole_batch_gradient(model, loss, batch)
    parts = [tuple(column[start : start + 5] for column in batch) for start in range(0, ROWS, 5)]
    mean_of_means(model, loss, parts)
    assert relative_error(model, reference) > 0.05


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning")
@pytest.mark.parametrize("name", ["cross entropy, weights", "mse", "kl, mean", "multi margin", "triplet", "ctc"])
def test_a_sum_accumulates_as_a_sum(name):
    model, criterion, batch = double_case(CASES[name])
    criterion.reduction = "sum"
    try:
        reference = whole_batch_gradient(model, whole_loss(CASES[name], criterion), batch)
        model.zero_grad()
        Accumulator(model, supervised(criterion), micro_batch=5).backward(batch)
        assert relative_error(model, reference) < 1e-12
    finally:
        criterion.reduction = "mean"


def test_parameters_of_the_criterion_itself_get_their_gradient():
    model, criterion, batch = double_case(CASES["linear cross entropy"])
    criterion.zero_grad()
    criterion(model(batch[0]), batch[1]).backward()
    reference = gradient(criterion.parameters())
    criterion.zero_grad()
    Accumulator(model, supervised(criterion), micro_batch=5).backward(batch)
    assert float((gradient(criterion.parameters()) - reference).norm() / reference.norm()) < 1e-12


def test_every_mean_reducing_criterion_of_torch_is_known():
    criteria = {
        kind
        for _, kind in inspect.getmembers(torch_losses, inspect.isclass)
        if issubclass(kind, torch_losses._Loss) and not kind.__name__.startswith("_")
    }
    assert criteria == set(RULES)
    assert {type(case.criterion) for case in CASES.values()} == criteria, "each has a case above"


class Focal(nn.CrossEntropyLoss):
    """A subclass may divide by anything."""


@pytest.mark.parametrize("criterion", [Focal(), lambda output, target: (output - target).abs().mean(), F.mse_loss])
def test_a_criterion_that_is_not_known_says_how_to_give_its_units(criterion):
    with pytest.raises(UnitsError, match=r"Give units=.*units=rows"):
        supervised(criterion)
    assert supervised(criterion, units=rows).units((torch.zeros(3, 1), torch.zeros(3, 1))) == 3


def test_a_criterion_that_does_not_reduce_is_refused():
    with pytest.raises(UnitsError, match=r"reduction='none'.*expected 'mean' or 'sum'"):
        supervised(nn.MSELoss(reduction="none"))


def test_weights_for_the_rows_of_one_batch_are_refused_with_the_fix():
    objective = supervised(nn.BCELoss(weight=torch.rand(8)))
    accumulator = Accumulator(nn.Sequential(nn.Linear(2, 1), nn.Flatten(0), nn.Sigmoid()), objective, micro_batch=4)
    with pytest.raises(UnitsError, match=r"shape \(8,\), one entry per row.*Put the weights into the batch"):
        accumulator.backward((torch.randn(8, 2), torch.rand(8)))


def test_a_batch_that_is_no_pair_is_refused_with_its_keys():
    with pytest.raises(BatchError, match=r"got dict with keys \['x', 'y'\]"):
        supervised(nn.MSELoss()).units({"x": torch.zeros(2), "y": torch.zeros(2)})


@pytest.mark.parametrize("targets", [["cat", "dog", "cat", "dog"], [0, 1, 0, 1]])
def test_targets_that_are_no_tensor_are_refused_with_the_fix(targets):
    accumulator = Accumulator(nn.Linear(3, 2), supervised(nn.CrossEntropyLoss()), micro_batch=2)
    with pytest.raises(BatchError, match=r"got list .* torch\.tensor\(\[0, 2, 1\]\)"):
        accumulator.backward((torch.randn(4, 3), targets))


def test_an_output_that_would_be_broadcast_against_all_targets_is_refused():
    accumulator = Accumulator(nn.Linear(3, 1), supervised(nn.MSELoss()), micro_batch=2)
    with pytest.raises(LossError, match=r"output has shape \(2, 1\) and the target \(2,\).*squeeze"):
        accumulator.backward((torch.randn(4, 3), torch.randn(4)))


def test_inputs_given_by_name_are_passed_by_keyword():
    class TwoInputs(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 1)

        def forward(self, left, right):
            return self.linear(left - right)

    model, objective = TwoInputs(), supervised(nn.MSELoss())
    batch = ({"right": torch.randn(7, 2), "left": torch.randn(7, 2)}, torch.randn(7, 1))
    reference = whole_batch_gradient(
        model, lambda twin, whole: F.mse_loss(twin.linear(whole[0]["left"] - whole[0]["right"]), whole[1]), batch
    )
    Accumulator(model, objective, micro_batch=3).backward(batch)
    assert relative_error(model, reference) < 5e-7


def test_class_weights_in_lower_precision_are_summed_in_float64():
    weights = torch.full((2,), 0.1)
    objective = supervised(nn.CrossEntropyLoss(weights))
    many = torch.zeros(100_001, dtype=torch.long)
    assert float(objective.units((many, many))) == pytest.approx(float(weights[0].double()) * 100_001, rel=1e-12)


def test_objectives_are_functions_of_the_model_and_the_batch():
    with pytest.raises(Exception, match=r"use supervised\(criterion\)"):
        Objective(nn.Linear(1, 1), units=3)

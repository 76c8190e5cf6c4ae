"""Every loss function of the one table: seen to divide by what torch divides by, against the whole batch in float64."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch import Accumulator, Objective, huggingface, observed
from anybatch.core.criteria import FUNCTIONAL_RULES
from anybatch.objectives import ObservedMeans
from tests.reference import relative_error, whole_batch_gradient

pytestmark = pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss:UserWarning")  # of kl_div

ROWS, CLASSES = 23, 5
Loss = Callable[[Tensor, dict[str, Tensor]], Tensor]
CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 20.0, 0.5, 3.0], dtype=torch.float64)


def ctc(out: Tensor, b: dict[str, Tensor]) -> Tensor:
    log_probs = out.repeat_interleave(6, 1).reshape(len(out), 6, CLASSES).log_softmax(2).transpose(0, 1)
    return F.ctc_loss(log_probs, b["texts"], torch.full((len(out),), 6), b["lengths"])


LOSSES: dict[Any, Loss] = {
    F.cross_entropy: lambda out, b: F.cross_entropy(out, b["classes"], weight=CLASS_WEIGHTS, ignore_index=1),
    F.linear_cross_entropy: lambda out, b: F.linear_cross_entropy(
        out, torch.eye(CLASSES).double(), b["classes"], ignore_index=1
    ),
    F.nll_loss: lambda out, b: F.nll_loss(out.log_softmax(1), b["classes"], weight=CLASS_WEIGHTS),
    F.l1_loss: lambda out, b: F.l1_loss(out, b["real"]),
    F.mse_loss: lambda out, b: F.mse_loss(out, b["real"], weight=b["positive"]),
    F.smooth_l1_loss: lambda out, b: F.smooth_l1_loss(out, b["real"]),
    F.huber_loss: lambda out, b: F.huber_loss(out, b["real"], weight=b["positive"]),
    F.binary_cross_entropy: lambda out, b: F.binary_cross_entropy(out.sigmoid(), b["share"], weight=b["positive"]),
    F.binary_cross_entropy_with_logits: lambda out, b: F.binary_cross_entropy_with_logits(out, b["share"]),
    F.poisson_nll_loss: lambda out, b: F.poisson_nll_loss(out, b["positive"]),
    F.gaussian_nll_loss: lambda out, b: F.gaussian_nll_loss(out, b["real"], b["positive"]),
    F.hinge_embedding_loss: lambda out, b: F.hinge_embedding_loss(out, b["signs"]),
    F.soft_margin_loss: lambda out, b: F.soft_margin_loss(out, b["signs"]),
    F.kl_div: lambda out, b: F.kl_div(out.log_softmax(1), b["share"].softmax(1), reduction="mean"),
    F.margin_ranking_loss: lambda out, b: F.margin_ranking_loss(out, b["real"], b["signs"], margin=0.5),
    F.cosine_embedding_loss: lambda out, b: F.cosine_embedding_loss(out, b["real"], b["signs"][:, 0]),
    F.multilabel_margin_loss: lambda out, b: F.multilabel_margin_loss(out, b["several"]),
    F.multilabel_soft_margin_loss: lambda out, b: F.multilabel_soft_margin_loss(out, (b["signs"] > 0).double()),
    F.multi_margin_loss: lambda out, b: F.multi_margin_loss(out, b["classes"], weight=CLASS_WEIGHTS),
    F.triplet_margin_loss: lambda out, b: F.triplet_margin_loss(out, b["real"], b["positive"]),
    F.triplet_margin_with_distance_loss: lambda out, b: F.triplet_margin_with_distance_loss(
        out, b["real"], b["positive"], swap=True
    ),
    F.ctc_loss: ctc,
}
OTHERS: dict[str, Loss] = {
    "kl_div, batchmean": lambda out, b: F.kl_div(out.log_softmax(1), b["share"].softmax(1), reduction="batchmean"),
    "mse_loss, no weight": lambda out, b: F.mse_loss(out, b["real"]),
    "cross_entropy, probabilities": lambda out, b: F.cross_entropy(out, b["share"].softmax(1)),
    "multilabel_soft_margin_loss, positions": lambda out, b: F.multilabel_soft_margin_loss(
        out[:, None].expand(-1, 3, -1), (b["signs"] > 0).double()[:, None].expand(-1, 3, -1)
    ),
}
ALL = {function.__name__: loss for function, loss in LOSSES.items()} | OTHERS


def batch() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "x": torch.randn(ROWS, 4).double(),
        "counts": torch.rand(ROWS) < torch.linspace(0.1, 1, ROWS),  # how many rows a micro-batch averages differs
        "classes": torch.randint(0, CLASSES, (ROWS,)),
        "real": torch.randn(ROWS, CLASSES).double(),
        "positive": 0.1 + torch.rand(ROWS, CLASSES).double(),
        "share": torch.rand(ROWS, CLASSES).double(),
        "signs": (torch.randint(0, 2, (ROWS, CLASSES)) * 2 - 1).double(),
        "several": torch.stack([torch.randperm(CLASSES) for _ in range(ROWS)]).where(torch.arange(CLASSES) < 2, -1),
        "texts": torch.randint(1, CLASSES, (ROWS, 3)),
        "lengths": torch.randint(1, 4, (ROWS,)),
    }


def of_counted_rows(loss: Loss) -> Callable[[nn.Module, dict[str, Tensor]], Tensor]:
    def run(model: nn.Module, given: dict[str, Tensor]) -> Tensor:
        counted = {name: values[given["counts"]] for name, values in given.items()}
        return loss(model(counted["x"]), counted)

    return run


def test_every_function_of_the_table_is_tried():
    assert set(LOSSES) == set(FUNCTIONAL_RULES)


@pytest.mark.parametrize("name", ALL)
def test_a_loss_function_is_seen_to_divide_by_what_the_whole_batch_needs(name):
    model, given, loss = nn.Linear(4, CLASSES).double(), batch(), of_counted_rows(ALL[name])
    reference = whole_batch_gradient(model, loss, given)
    Accumulator(model, observed(loss), micro_batch=6).backward(given)
    assert relative_error(model, reference) < 1e-13


@pytest.mark.parametrize("name", ALL)
def test_rows_in_place_of_what_was_seen_are_wrong(name):
    model, given, loss = nn.Linear(4, CLASSES).double(), batch(), of_counted_rows(ALL[name])
    reference = whole_batch_gradient(model, loss, given)
    Accumulator(model, Objective(loss), micro_batch=6).backward(given)
    assert relative_error(model, reference) > 1e-3


@pytest.mark.parametrize("name", ALL)
def test_huggingface_and_observed_see_the_same(name):
    model, given, loss = nn.Linear(4, CLASSES).double(), batch(), of_counted_rows(ALL[name])
    with ObservedMeans() as own:
        loss(model, given)
    with ObservedMeans(plain=True) as with_plain:
        loss(model, given)
    assert [float(units) for units in own.units] == [float(units) for units in with_plain.units]
    assert len(own.units) == 1


@pytest.mark.parametrize("old", [{"size_average": False}, {"reduce": False}])
def test_sums_and_losses_per_element_are_no_means_under_old_names_too(old):
    out, target = torch.randn(3, 2, requires_grad=True), torch.randn(3, 2)
    with ObservedMeans(plain=True) as seen:
        F.mse_loss(out, target, reduction="sum")
        F.mse_loss(out, target, reduction="none")
        with pytest.warns(UserWarning, match="size_average and reduce"):
            F.mse_loss(out, target, **old)
    assert seen.units == []


class WithMargins(nn.Module):
    """A head in the manner of transformers, with a loss that `huggingface()` did not know."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, CLASSES).double()

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return SimpleNamespace(loss=F.multi_margin_loss(self.linear(x), labels))


def test_huggingface_takes_a_head_whose_loss_only_observed_knew():
    model, given = WithMargins(), {name: batch()[key] for name, key in (("x", "x"), ("labels", "classes"))}
    reference = whole_batch_gradient(model, lambda model, given: model(**given).loss, given)
    Accumulator(model, huggingface(), micro_batch=6).backward(given)
    assert relative_error(model, reference) < 1e-13

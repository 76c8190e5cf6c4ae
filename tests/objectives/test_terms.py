"""`Terms`: each mean is divided by its own units over the whole batch; `observed`: nobody counts them."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch import Accumulator, LossError, Objective, Rows, Sum, Terms, UnitsError, Update, observed, rows, verify
from anybatch.core import take_rows
from tests.reference import doubled, gradient, mean_of_means, relative_error, whole_batch_gradient
from tests.setups import seeded

ROWS, LENGTH, WIDTH = 15, 7, 6


_seeded = seeded(3)


class Tagger(nn.Module):
    """A label for each token, and one for the row; some tokens and some rows have none."""

    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(WIDTH, 8), norm or nn.Identity()
        self.token, self.row = nn.Linear(8, 4), nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        states = self.inner(inputs).tanh()
        states = self.norm(states.flatten(0, 1)).view_as(states)
        return self.token(states), self.row(states.mean(1))


def batch() -> dict[str, Tensor]:
    lengths = torch.randint(0, LENGTH + 1, (ROWS, 1))
    lengths[:4] = 0  # a micro-batch with no token that counts
    tags = torch.where(torch.arange(LENGTH) < lengths, torch.randint(0, 4, (ROWS, LENGTH)), -100)
    kinds = torch.where(torch.rand(ROWS) < 0.4, torch.randint(0, 3, (ROWS,)), -100)
    kinds[4:8] = -100
    return {"x": torch.randn(ROWS, LENGTH, WIDTH), "tags": tags, "kinds": kinds}


def terms(model: nn.Module, given: Any) -> dict[str, Tensor]:
    tokens, kinds = model(given["x"])
    return {
        "tags": F.cross_entropy(tokens.flatten(0, 1), given["tags"].flatten()),
        "kinds": F.cross_entropy(kinds, given["kinds"]),
        "norm": model.row.weight.square().sum(),
    }


UNITS = {"tags": lambda b: (b["tags"] != -100).sum(), "kinds": lambda b: (b["kinds"] != -100).sum(), "norm": None}
WEIGHTS = {"kinds": 0.3, "norm": 0.05}
OBJECTIVE = Terms(terms, units=UNITS, weights=WEIGHTS)


def whole_loss(model: nn.Module, given: Any) -> Tensor:
    every = terms(model, given)
    return every["tags"] + 0.3 * every["kinds"] + 0.05 * every["norm"]


@pytest.mark.parametrize("micro_batch", [1, 2, 4, 7, ROWS])
@pytest.mark.parametrize("norm", [None, nn.BatchNorm1d(8)], ids=["plain", "exact BatchNorm"])
def test_each_term_is_divided_by_its_own_units_over_the_whole_batch(micro_batch, norm):
    model, given = Tagger(copy.deepcopy(norm)).double(), doubled(batch())
    reference = whole_batch_gradient(model, whole_loss, given)
    result = Accumulator(model, OBJECTIVE, micro_batch=micro_batch, batch_norm="exact").backward(given)
    assert relative_error(model, reference) < 1e-14
    if norm is None:
        assert float(result.loss) == pytest.approx(float(whole_loss(model, given).detach()), rel=1e-12)
        for name, value in terms(model, given).items():
            assert float(result.metrics[name]) == pytest.approx(float(value.detach()), rel=1e-12)


def test_one_number_of_units_for_all_terms_is_not():
    model, given = Tagger().double(), doubled(batch())
    reference = whole_batch_gradient(model, whole_loss, given)
    for units in (rows, UNITS["tags"]):
        model.zero_grad()
        kept = [part for part in Rows(4).cut(given) if all(UNITS[name](part) > 0 for name in ("tags", "kinds"))]
        Accumulator(model, Objective(whole_loss, units), micro_batch=4).backward(take_rows(given, slice(8, ROWS)))
        assert relative_error(model, reference) > 1e-2
    mean_of_means(model, whole_loss, kept)
    assert relative_error(model, reference) > 1e-2


def test_it_is_exact_beside_a_loss_scale():
    model, given = Tagger(), batch()
    reference = whole_batch_gradient(model, whole_loss, given)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    assert Update(model, optimizer, OBJECTIVE, micro_batch=4, scaler=scaler)(given).applied
    assert relative_error(model, reference) < 5e-7


def test_a_micro_batch_that_is_dropped_leaves_every_term_the_mean_of_the_rest():
    model, given = Tagger().double(), doubled(batch())
    given["x"][9, 0, 0] = torch.inf
    cut = Rows(4).cut(given)
    bad = next(index for index, part in enumerate(cut) if not part["x"].isfinite().all())
    kept = [row for index, numbers in enumerate(cut.row_numbers) for row in numbers if index != bad]
    reference = whole_batch_gradient(model, whole_loss, take_rows(given, kept))
    result = Accumulator(model, OBJECTIVE, micro_batch=4, drop_nonfinite=True).backward(given)
    assert result.dropped == (bad,)
    assert result.units == len(kept)
    assert relative_error(model, reference) < 1e-14


def test_metrics_of_the_users_own_go_along():
    objective = Terms(lambda m, b: (terms(m, b), {"seen": Sum(len(b["x"]))}), units=UNITS, weights=WEIGHTS)
    result = Accumulator(Tagger(), objective, micro_batch=4).backward(batch())
    assert set(result.metrics) == {"tags", "kinds", "norm", "seen"}
    assert float(result.metrics["seen"]) == ROWS


def test_verify_finds_terms_exact():
    verdict = verify(Tagger(), OBJECTIVE, batch())
    assert verdict.is_exact, verdict.describe()


def test_a_batch_with_nothing_for_any_term_leaves_zero_gradients():
    given = batch()
    given["tags"][:], given["kinds"][:] = -100, -100
    objective = Terms(
        lambda m, b: {name: loss for name, loss in terms(m, b).items() if name != "norm"},
        units={name: UNITS[name] for name in ("tags", "kinds")},
    )
    model = Tagger()
    result = Accumulator(model, objective, micro_batch=4).backward(given)
    assert result.units == 0
    assert set(result.metrics) <= {"tags", "kinds"}
    assert float(gradient(model.parameters()).norm()) == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Terms(terms, units={}), "expected a dict of functions"),
        (lambda: Terms(terms, units=rows), "expected a dict of functions"),
        (lambda: Terms(terms, units={"tags": 3}), "'tags': 3"),
        (
            lambda: Terms(terms, units={"tags": rows}, weights={"kinds": 2.0}),
            "names 'kinds', which units do not: 'tags'",
        ),
        (lambda: Terms(terms, units={"tags": rows}, weights={"tags": "2"}), "expected a number"),
        (lambda: Terms(None, units={"tags": rows}), "expected a function"),
    ],
)
def test_what_makes_no_terms_is_refused(make, message):
    with pytest.raises(LossError, match=message):
        make()


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda m, b: m(b["x"])[0].mean(), "expected a dict of mean losses by name"),
        (lambda m, b: {"tags": m(b["x"])[0].mean()}, "returned terms 'tags', but units are given for 'tags', 'kinds'"),
        (lambda m, b: dict.fromkeys(UNITS, m(b["x"])[0]), r"the term 'tags' is of shape \(4, 7, 4\)"),
        (lambda m, b: dict.fromkeys(UNITS, 1.0), "the term 'tags' is of float"),
    ],
)
def test_what_a_loss_returns_must_fit_the_units(loss, message):
    with pytest.raises(LossError, match=message):
        Accumulator(Tagger(), Terms(loss, units=UNITS), micro_batch=4).backward(batch())


def tag_loss(model: nn.Module, given: Any) -> Tensor:
    return F.cross_entropy(model(given["x"])[0].flatten(0, 1), given["tags"].flatten())


OBSERVED = {
    "ignored targets": tag_loss,
    "class weights": lambda m, b: F.cross_entropy(
        m(b["x"])[0].flatten(0, 1), b["tags"].flatten(), weight=torch.tensor([0.1, 1, 5, 20]).to(b["x"])
    ),
    "a plain mean": lambda m, b: (m(b["x"])[0] - 1).square().mean(),
    "two means over the same": lambda m, b: (
        tag_loss(m, b) + F.nll_loss(m(b["x"])[0].flatten(0, 1).log_softmax(1), b["tags"].flatten())
    ),
    "a penalty beside": lambda m, b: tag_loss(m, b) + 0.1 * m.token.weight.square().sum(),
    "elements and rows": lambda m, b: F.mse_loss(m(b["x"])[0], b["x"][..., :4]) + m(b["x"])[1].square().mean(),
}


@pytest.mark.parametrize("micro_batch", [1, 4, ROWS])
@pytest.mark.parametrize("name", OBSERVED)
def test_observed_units_give_the_gradient_of_the_whole_batch(name, micro_batch):
    model, given = Tagger().double(), doubled(batch())
    reference = whole_batch_gradient(model, OBSERVED[name], given)
    result = Accumulator(model, observed(OBSERVED[name]), micro_batch=micro_batch).backward(given)
    assert relative_error(model, reference) < 1e-14
    assert float(result.loss) == pytest.approx(float(OBSERVED[name](model, given).detach()), rel=1e-12)


def test_rows_for_units_do_not():
    model, given = Tagger().double(), doubled(batch())
    given = take_rows(given, slice(4, ROWS))
    reference = whole_batch_gradient(model, tag_loss, given)
    Accumulator(model, Objective(tag_loss), micro_batch=4).backward(given)
    assert not relative_error(model, reference) < 1e-2


def test_observed_units_are_exact_through_exact_batch_norm_and_reported():
    model, given = Tagger(nn.BatchNorm1d(8)).double(), doubled(batch())
    reference = whole_batch_gradient(model, tag_loss, given)
    result = Accumulator(model, observed(tag_loss), micro_batch=4, batch_norm="exact").backward(given)
    assert relative_error(model, reference) < 1e-13
    assert result.units == int((given["tags"] != -100).sum())


def test_a_dropped_micro_batch_counts_for_nothing_where_units_are_observed():
    model, given = Tagger().double(), doubled(batch())
    given["x"][9, 0, 0] = torch.inf
    given["tags"][9] = 1
    cut = Rows(4).cut(given)
    bad = next(index for index, part in enumerate(cut) if not part["x"].isfinite().all())
    kept = [row for index, numbers in enumerate(cut.row_numbers) for row in numbers if index != bad]
    reference = whole_batch_gradient(model, tag_loss, take_rows(given, kept))
    Accumulator(model, observed(tag_loss), micro_batch=4, drop_nonfinite=True).backward(given)
    assert relative_error(model, reference) < 1e-14


def test_means_over_different_units_are_told_apart_from_one_mean():
    def both(model: nn.Module, given: Any) -> Tensor:
        return sum(loss for name, loss in terms(model, given).items() if name != "norm")

    given = take_rows(batch(), slice(8, ROWS))
    with pytest.raises(UnitsError, match=r"(?s)divide by .* Use Terms\(loss"):
        Accumulator(Tagger(), observed(both), micro_batch=2).backward(given)


def test_a_loss_that_shows_no_mean_is_refused():
    with pytest.raises(UnitsError, match="could not be seen"):
        Accumulator(Tagger(), observed(lambda m, b: m(b["x"])[0].sum() / 3), micro_batch=4).backward(batch())
    with pytest.raises(LossError, match="expected a function"):
        observed(None)

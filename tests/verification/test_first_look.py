"""The guard of `Update`: losses that do not add up are refused at the first update, and all else trains as if nobody looked."""

import copy
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch import (
    Cost,
    Coupled,
    Dealt,
    ExactnessError,
    MicroBatches,
    Objective,
    Terms,
    Tokens,
    Update,
    UpdateError,
    info_nce,
    observed,
    row_dropout,
    rows,
    supervised,
)
from tests.reference import gradient, whole_batch_gradient
from tests.setups import seeded

ROWS, WIDTH, CLASSES, LENGTH = 40, 6, 3, 7
CE = nn.CrossEntropyLoss()


_seeded = seeded(7)


def mlp(dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Dropout(dropout), nn.Linear(12, CLASSES))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, CLASSES))


def labelled() -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, WIDTH), torch.randint(0, CLASSES, (ROWS,))


def partly_labelled() -> tuple[Tensor, Tensor]:
    inputs, targets = labelled()
    return inputs, torch.where(torch.rand(ROWS) < 0.5, targets, -100)


def ragged() -> dict[str, Tensor]:
    lengths = torch.randint(1, LENGTH + 1, (ROWS, 1))
    mask = (torch.arange(LENGTH) < lengths).long()
    labels = torch.where(mask == 1, torch.randint(0, CLASSES, (ROWS, LENGTH)), -100)
    return {"x": torch.randn(ROWS, LENGTH, WIDTH), "attention_mask": mask, "labels": labels}


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def token_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["labels"].flatten())


def num_labels(batch: Any) -> Tensor:
    return (batch["labels"] != -100).sum()


def dice(model: nn.Module, batch: Any) -> Tensor:
    guess, wanted = model(batch[0]).softmax(1)[:, 0], batch[1] == 0
    return 1 - 2 * (guess * wanted).sum() / (guess.sum() + wanted.sum())


class Standardised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner((inputs - inputs.mean(0)) / (inputs.std(0) + 1))


class CountsForwards(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = mlp(), 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(inputs) * self.calls


class Experts(nn.Module):
    """Two experts and a router whose balance is a product of two means over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 2), nn.ModuleList([nn.Linear(WIDTH, CLASSES) for _ in range(2)])

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        gates = self.router(inputs).softmax(1)
        outputs = sum(gates[:, [index]] * expert(inputs) for index, expert in enumerate(self.experts))
        chosen = F.one_hot(gates.argmax(1), 2).double()
        return outputs, 2 * (chosen.mean(0).to(gates.dtype) * gates.mean(0)).sum()


def balanced(model: nn.Module, batch: Any) -> Tensor:
    outputs, balance = model(batch[0])
    return F.cross_entropy(outputs, batch[1]) + 0.1 * balance


WEIGHTS = torch.tensor([0.2, 1.0, 20.0])
Setup = tuple[Callable[[], nn.Module], Callable[[], Any], Callable[[], Any], dict[str, Any]]

BROKEN: dict[str, tuple[str, Setup]] = {
    "ignored targets": ("units", (mlp, lambda: Objective(loss_of), partly_labelled, {})),
    "tokens counted as rows": ("units", (mlp, lambda: Objective(token_loss), ragged, {})),
    "padding counted": ("units", (mlp, lambda: Objective(token_loss, lambda b: b["labels"].numel()), ragged, {})),
    "class weights": (
        "units",
        (mlp, lambda: Objective(lambda m, b: F.cross_entropy(m(b[0]), b[1], weight=WEIGHTS.to(b[0]))), labelled, {}),
    ),
    "an undeclared sum": (
        "sum",
        (mlp, lambda: Objective(lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="sum")), labelled, {}),
    ),
    "a mean called a sum": ("mean", (mlp, lambda: Objective(loss_of, rows, "sum"), labelled, {})),
    "perplexity": ("not_additive", (mlp, lambda: Objective(lambda m, b: loss_of(m, b).exp()), labelled, {})),
    "dice": ("not_additive", (mlp, lambda: Objective(dice), labelled, {})),
    "standardised inputs": ("coupled", (Standardised, lambda: supervised(CE), labelled, {})),
    "a router's balance": ("not_additive", (Experts, lambda: Objective(balanced), labelled, {})),
    "an encoder that looks around": (
        "coupled",
        (Standardised, lambda: Coupled(lambda m, b: (m(b[0]), m(b[0] + 1)), info_nce()), labelled, {}),
    ),
    "a counter in forward": ("state", (CountsForwards, lambda: supervised(CE), labelled, {})),
    "with dropout": ("units", (lambda: mlp(0.3), lambda: Objective(loss_of), partly_labelled, {})),
    "beside exact BatchNorm": ("units", (normed, lambda: Objective(loss_of), partly_labelled, {"batch_norm": "exact"})),
    "a term's units": (
        "units",
        (
            mlp,
            lambda: Terms(
                lambda m, b: {"a": token_loss(m, b), "b": m[0].weight.square().sum()}, units={"a": rows, "b": None}
            ),
            ragged,
            {},
        ),
    ),
}


def updated(setup: Setup, **options: Any) -> tuple[nn.Module, Update, Any]:
    make, objective, batch, more = setup
    model = make().double()
    given = batch()
    if isinstance(given, dict):
        given["x"] = given["x"].double()
    else:
        given = (given[0].double(), *given[1:])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return model, Update(model, optimizer, objective(), micro_batch=11, **more, **options), given


@pytest.mark.parametrize("name", BROKEN)
def test_a_loss_that_does_not_add_up_is_refused_with_its_cause(name):
    kind, setup = BROKEN[name]
    model, update, batch = updated(setup)
    before = copy.deepcopy(model.state_dict())
    for _ in range(2):  # it is not forgotten after the first refusal
        with pytest.raises(ExactnessError, match=rf"(?s)nothing was changed.*\({kind}\): .*fix: .*verify.*check='off'"):
            update(batch)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("name", [name for name in BROKEN if name not in ("with dropout", "a term's units")])
def test_its_gradient_is_wrong_in_silence_where_nobody_looks(name):
    _, setup = BROKEN[name]
    model, update, batch = updated(setup, check="off")
    whole = update.accumulator.objective.whole().loss
    reference = whole_batch_gradient(model, whole, batch)
    update(batch)
    assert update.guard.finding == "off"
    assert float((gradient(model.parameters()) - reference).norm() / reference.norm()) > 1e-3


SOUND: dict[str, Setup] = {
    "rows": (mlp, lambda: Objective(loss_of), labelled, {}),
    "stock dropout": (lambda: mlp(0.4), lambda: Objective(loss_of), labelled, {}),
    "dropout by row": (lambda: row_dropout(mlp(0.4)), lambda: Objective(loss_of), labelled, {}),
    "ignored targets": (mlp, lambda: supervised(CE), partly_labelled, {}),
    "tokens": (mlp, lambda: Objective(token_loss, num_labels), ragged, {}),
    "a sum": (
        mlp,
        lambda: Objective(lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="sum"), reduction="sum"),
        labelled,
        {},
    ),
    "exact BatchNorm": (normed, lambda: Objective(loss_of), labelled, {"batch_norm": "exact"}),
    "BatchNorm by micro-batch": (normed, lambda: Objective(loss_of), labelled, {"batch_norm": "micro"}),
    "frozen BatchNorm": (normed, lambda: Objective(loss_of), labelled, {"batch_norm": "frozen"}),
    "coupled": (mlp, lambda: Coupled(lambda m, b: (m(b[0]), m(b[0] + 1)), info_nce()), labelled, {}),
    "terms": (
        mlp,
        lambda: Terms(
            lambda m, b: {"tokens": token_loss(m, b), "norm": m[0].weight.square().sum()},
            units={"tokens": num_labels, "norm": None},
        ),
        ragged,
        {},
    ),
    "observed": (mlp, lambda: observed(loss_of), partly_labelled, {}),
    "a loss near zero by cancellation": (
        mlp,
        lambda: Objective(lambda m, b: 1e3 * (m(b[0])[:, 0] * (2 * (b[1] == 0) - 1)).mean() + 1e-6 * loss_of(m, b)),
        labelled,
        {},
    ),
    "a constant that depends on the rows together": (
        mlp,
        lambda: Objective(lambda m, b: loss_of(m, b) + b[0].std().detach()),
        labelled,
        {},
    ),
    "steps drawn for each row": (
        mlp,
        lambda: Objective(lambda m, b: F.cross_entropy(m(b[0] * torch.randint(0, 9, (len(b[0]), 1))), b[1])),
        labelled,
        {},
    ),
    "a gradient inside the loss": (
        mlp,
        lambda: Objective(lambda m, b: loss_of(m, b) + _smoothness(m, b)),
        labelled,
        {},
    ),
    "bf16": (
        lambda: mlp().bfloat16(),
        lambda: Objective(lambda m, b: F.cross_entropy(m(b[0].bfloat16()).float(), b[1])),
        labelled,
        {},
    ),
    "autocast": (mlp, lambda: Objective(loss_of), labelled, {"autocast": torch.bfloat16}),
    "padding cut off": (
        mlp,
        lambda: Objective(token_loss, num_labels),
        ragged,
        {"micro_batch": Tokens(3 * LENGTH, cost=Cost(), per_token=["x"])},
    ),
    "micro-batches": (
        mlp,
        lambda: Objective(loss_of),
        lambda: MicroBatches([labelled(), labelled()]),
        {},
    ),
    "dealt": (mlp, lambda: Objective(loss_of), lambda: Dealt(labelled(), tuple(range(ROWS)), ROWS), {}),
}


def _smoothness(model: nn.Module, batch: Any) -> Tensor:
    inputs = batch[0].clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
    return slope.square().sum(1).mean()


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_one_passes_and_trains_to_the_bit_as_if_nobody_had_looked(name):
    make, objective, batch, more = SOUND[name]
    start, batches = make(), [batch() for _ in range(2)]
    weights = []
    for check in ("first", "off"):
        torch.manual_seed(1)
        model = copy.deepcopy(start)
        options = {"micro_batch": 11, **more}
        update = Update(model, torch.optim.Adam(model.parameters(), lr=0.01), objective(), check=check, **options)
        for one in batches:
            update(one)
        assert update.guard.finding == ("passed" if check == "first" else "off"), update.guard
        weights.append(torch.cat([value.flatten().double() for value in model.state_dict().values()]))
    assert torch.equal(*weights)


def test_eight_rows_run_twice_without_a_graph_and_nothing_runs_later():
    seen: list[tuple[int, bool]] = []

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, inputs: Tensor) -> Tensor:
            log(len(inputs))
            return self.inner(inputs)

    def log(count: int, into: Any = (seen,)) -> None:  # held where nobody looks for state: a change would be looked at
        into[0].append((count, torch.is_grad_enabled()))

    model = Watched()
    update = Update(model, torch.optim.SGD(model.parameters(), lr=0.1), Objective(loss_of), micro_batch=20)
    update(labelled())
    assert [count for count, has_graph in seen if not has_graph] == [8, 2, 6]
    update(labelled())
    assert [count for count, has_graph in seen if has_graph] == [20, 20, 20, 20]
    assert len(seen) == 7


def test_what_the_model_holds_is_left_as_it_was_and_what_lies_outside_is_told():
    calls, log, drawn = 0, [], random.Random(3)
    noise = torch.Generator().manual_seed(5)
    steps = np.random.default_rng(0)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        log.append(len(batch[0]))
        drawn.random(), steps.random(), torch.rand(1, generator=noise)
        return loss_of(model, batch)

    model = mlp()
    model[0].notes = ["first"]
    model[0].register_forward_hook(lambda module, inputs, output: module.notes.append("ran"))
    states = []
    for check in ("first", "off"):
        calls, model[0].notes = 0, ["first"]
        log.clear(), drawn.seed(3), noise.manual_seed(5)
        steps.bit_generator.state = np.random.default_rng(0).bit_generator.state
        update = Update(
            model, torch.optim.SGD(model.parameters(), lr=0.0), Objective(loss), micro_batch=11, check=check
        )
        update(labelled())
        after = drawn.getstate(), noise.get_state().tolist(), steps.bit_generator.state
        states.append((list(model[0].notes), after))
        if check == "first":
            assert update.guard.finding == "passed"
            assert "changed calls (0 -> " in update.guard.reason
            assert "log, outside of the model" in update.guard.reason
            assert calls == len(log) > 4
    assert states[0] == states[1]
    assert calls == len(log) == 4


def test_a_batch_that_is_not_cut_is_exact_whatever_its_loss_and_the_first_that_is_cut_is_looked_at():
    model = mlp()
    update = Update(model, torch.optim.SGD(model.parameters(), lr=0.1), Objective(dice), micro_batch=ROWS)
    assert update(labelled()).applied
    assert update.guard.finding == "pending"
    longer = tuple(torch.cat(columns) for columns in zip(labelled(), labelled(), strict=True))
    with pytest.raises(ExactnessError, match="not the whole batch's"):
        update(longer)


NOT_JUDGED = {
    "numpy": (lambda m, b: loss_of(m, b) * (1 + 0.1 * np.random.rand()), "numpy.random"),
    "python": (lambda m, b: loss_of(m, b) * (1 + 0.1 * random.random()), "draws from random"),
    "an order of the rows": (
        lambda m, b: F.cross_entropy(m(b[0] + b[0][torch.randperm(len(b[0]))]), b[1]),
        "an order or a choice among the rows",
    ),
}


@pytest.mark.parametrize("name", NOT_JUDGED)
def test_what_cannot_be_judged_is_told_and_trains(name):
    loss, reason = NOT_JUDGED[name]
    model = mlp()
    update = Update(model, torch.optim.SGD(model.parameters(), lr=0.1), Objective(loss), micro_batch=11)
    assert update(labelled()).applied
    assert update.guard.finding == "not judged"
    assert reason in update.guard.reason


def test_units_that_are_off_by_a_little_are_seen_though_the_losses_hardly_differ():
    """At the start every target costs nearly the same, so that only what the loss was seen to divide by shows it."""
    model = nn.Linear(WIDTH, CLASSES)
    nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
    objective = Objective(token_loss, lambda batch: batch["attention_mask"][:, 1:].sum())
    update = Update(model, torch.optim.SGD(model.parameters(), lr=0.1), objective, micro_batch=11)
    with pytest.raises(ExactnessError, match=r"(?s)cause \(units\).*not -100"):
        update(ragged())


ANSWERS = [("off", "off"), (False, "off"), ("first", "pending"), ("full", "pending"), (True, "pending")]


@pytest.mark.parametrize(("given", "finding"), ANSWERS)
def test_true_and_full_are_deprecated_names_of_first_and_false_is_off(given, finding):
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    is_old = given in (True, "full") and given is not False
    with pytest.warns(DeprecationWarning, match=r"Call verify\(") if is_old else nullcontext() as seen:
        update = Update(model, sgd, Objective(dice), micro_batch=11, check=given)
    assert not is_old or seen[0].filename == __file__
    assert update.guard.finding == finding
    if finding == "off":
        assert update(labelled()).applied
    else:
        with pytest.raises(ExactnessError, match="first batch shows"):
            update(labelled())


def test_any_other_word_is_refused():
    model = mlp()
    with pytest.raises(UpdateError, match=r"check='always'.*expected one of off, first"):
        Update(model, torch.optim.SGD(model.parameters(), lr=0.1), Objective(dice), micro_batch=11, check="always")


def test_a_loss_whose_function_belongs_to_no_module_is_judged():
    names: dict[str, Any] = {}
    exec("loss = lambda model, batch: model(batch[0]).mean().exp()", names)
    names["loss"].__module__ = None
    model = mlp()
    update = Update(model, torch.optim.SGD(model.parameters(), lr=0.1), Objective(names["loss"]), micro_batch=11)
    with pytest.raises(ExactnessError):
        update(labelled())

"""Planted mistakes: verify says that they are not exact, names the cause, and the fix that it names makes them exact."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch import Coupled, Objective, Tokens, huggingface, info_nce, rows, supervised, verify
from tests.setups import seeded
from tests.verification.sound import (
    GPT,
    ROWS,
    both,
    cnn,
    gpt2,
    images,
    mlp,
    next_token,
    rows_of_numbers,
    shifted,
    texts,
    towers,
)

_seeded = seeded(3)


def only_cause(verdict):
    assert not verdict.is_exact
    assert len(verdict.causes) == 1, verdict.describe()
    for text in (verdict.causes[0].explanation, verdict.causes[0].fix):
        assert text.endswith("."), text
        assert " ." not in text, text
    return verdict.causes[0]


def test_mean_of_means_units_are_named_with_the_count_that_is_right():
    model, batch = GPT(), texts()
    cause = only_cause(verify(model, Objective(next_token, lambda batch: 1), batch))
    assert cause.kind == "units"
    assert "batch['labels'] that are not -100, but for the first of each row" in cause.explanation
    assert "lambda batch: (batch['labels'][:, 1:] != -100).sum()" in cause.fix
    units = eval(cause.fix.removeprefix("Give units=").removesuffix("."))
    assert verify(model, Objective(next_token, units), batch).is_exact


def test_rows_as_units_of_a_token_mean_are_named():
    cause = only_cause(verify(GPT(), Objective(next_token, rows), texts()))
    assert cause.kind == "units"
    assert "[:, 1:] != -100" in cause.fix


def test_unshifted_token_counts_are_named():
    wrong = Objective(next_token, lambda batch: (batch["labels"] != -100).sum())
    cause = only_cause(verify(GPT(), wrong, texts()))
    assert cause.kind == "units"
    assert "(batch['labels'][:, 1:] != -100).sum()" in cause.fix
    assert verify(GPT(), Objective(next_token, shifted), texts()).is_exact


def test_unshifted_token_counts_of_a_transformers_model_are_named():
    wrong = huggingface(units=lambda batch: (batch["labels"] != -100).sum())
    cause = only_cause(verify(gpt2(), wrong, texts()))
    assert cause.kind == "units"
    assert "[:, 1:] != -100" in cause.fix


def test_class_weights_are_named():
    weight = torch.tensor([0.2, 1.0, 20.0])
    batch = rows_of_numbers()
    wrong = Objective(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], weight=weight))
    cause = only_cause(verify(mlp(), wrong, batch))
    assert cause.kind == "units"
    assert "summed class weights" in cause.explanation
    assert "and should weigh" in cause.explanation
    assert "supervised(nn.CrossEntropyLoss(weight=weight))" in cause.fix
    assert verify(mlp(), supervised(nn.CrossEntropyLoss(weight=weight)), batch).is_exact


def test_sample_weights_in_the_batch_are_named():
    batch = (*rows_of_numbers(), torch.rand(ROWS))

    def weighted(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return (losses * batch[2]).sum() / batch[2].sum()

    cause = only_cause(verify(mlp(), Objective(weighted), batch))
    assert (cause.kind, cause.fix) == ("units", "Give units=lambda batch: batch[2].sum().")


def test_a_sum_given_as_a_mean_is_named_and_the_other_way_round():
    batch = rows_of_numbers()
    wrong = Objective(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="sum"))
    assert only_cause(verify(mlp(), wrong, batch)).kind == "sum"
    assert verify(mlp(), replace(wrong, reduction="sum"), batch).is_exact
    mean = Objective(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), reduction="sum")
    assert only_cause(verify(mlp(), mean, batch)).kind == "mean"


@pytest.mark.parametrize("mode", [None, "micro"])
def test_batch_norm_by_micro_batch_is_named(mode):
    model = cnn(nn.BatchNorm2d)
    cause = only_cause(verify(model, supervised(nn.CrossEntropyLoss()), images(), batch_norm=mode))
    assert cause.kind == "batch_norm"
    assert "2 BatchNorm layers ('1', '5')" in cause.explanation
    assert "batch_norm='exact'" in cause.fix


def test_frozen_batch_norm_is_exact_against_the_whole_batch_with_frozen_batch_norm():
    assert verify(cnn(nn.BatchNorm2d), supervised(nn.CrossEntropyLoss()), images(), batch_norm="frozen").is_exact


def test_batch_norm_and_units_together_are_both_named():
    weight = torch.tensor([0.2, 1.0, 20.0])
    wrong = Objective(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], weight=weight))
    verdict = verify(cnn(nn.BatchNorm2d), wrong, images(), batch_norm="micro")
    assert [cause.kind for cause in verdict.causes] == ["batch_norm", "units"]


def test_info_nce_as_a_plain_objective_is_named_and_it_is_the_loss_that_couples():
    pairs = torch.randn(ROWS, 6), torch.randn(ROWS, 6)
    loss = info_nce()
    cause = only_cause(verify(towers(), Objective(lambda model, pair: loss(both(model, pair))), pairs))
    assert cause.kind == "coupled"
    assert "it is the loss that does" in cause.explanation
    assert "Coupled(encode, loss)" in cause.fix
    assert verify(towers(), Coupled(both, info_nce()), pairs).is_exact


class Centred(nn.Module):
    """Subtracts the mean over rows."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0, keepdim=True)


def test_a_layer_that_mixes_rows_is_named():
    model = nn.Sequential(nn.Linear(6, 8), Centred(), nn.Tanh(), nn.Linear(8, 3))
    cause = only_cause(verify(model, supervised(nn.CrossEntropyLoss()), rows_of_numbers()))
    assert cause.kind == "coupled"
    assert "'1' (Centred)" in cause.explanation


class Experts(nn.Module):
    """Every row goes to one of two experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(6, 2), nn.ModuleList(nn.Linear(6, 3) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(1).max(1)
        out = torch.zeros(len(x), 3).to(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, None])
        return out


def balanced(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    load = model.gate(batch[0]).softmax(1).mean(0)
    return F.cross_entropy(model(batch[0]), batch[1]) + load.square().sum()


def test_experts_that_some_micro_batches_do_not_meet_are_exact_and_balancing_them_is_coupled():
    model, batch = Experts(), rows_of_numbers()
    assert verify(model, supervised(nn.CrossEntropyLoss()), batch).is_exact
    cause = only_cause(verify(model, Objective(balanced), batch))
    assert cause.kind == "not_additive"
    assert "it is the loss that does" in cause.explanation


def test_power_iterations_of_spectral_norm_are_no_mistake():
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 16)), nn.Tanh(), nn.Linear(16, 3))
    assert verify(model, supervised(nn.CrossEntropyLoss()), rows_of_numbers()).is_exact


class Counting(nn.Module):
    """Its output depends on how often it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(x) * (1 + 0.1 * self.calls)


def test_a_counter_in_forward_is_named():
    model = Counting()
    cause = only_cause(verify(model, supervised(nn.CrossEntropyLoss()), rows_of_numbers()))
    assert cause.kind == "state"
    assert "calls (0 -> 1)" in cause.explanation
    assert model.calls == 0


def test_a_counter_that_the_loss_closes_over_is_named():
    calls = 0

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        nonlocal calls
        calls += 1
        return F.cross_entropy(model(batch[0]) * calls, batch[1])

    cause = only_cause(verify(mlp(), Objective(loss), rows_of_numbers()))
    assert cause.kind == "state"
    assert re.search(r"A forward changes calls \(\d+ -> \d+\), outside of the model", cause.explanation)
    assert calls > 0  # it is named, and not put back


class Smoothed(nn.Module):
    """Divides by a moving average, a buffer that every forward moves."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x) / self.scale.clone()
        with torch.no_grad():
            self.scale.mul_(0.9).add_(0.5)
        return out


def test_a_buffer_that_a_forward_moves_is_named():
    cause = only_cause(verify(Smoothed(), supervised(nn.CrossEntropyLoss()), rows_of_numbers()))
    assert cause.kind == "state"
    assert "scale (1 -> 1.4)" in cause.explanation


class NumpyNoise(nn.Module):
    """Noise from NumPy's own generator."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x + torch.from_numpy(np.random.randn(*x.shape)).to(x))


def test_numpy_noise_in_forward_is_named():
    before = np.random.get_state()[1].copy()
    cause = only_cause(verify(NumpyNoise(), supervised(nn.CrossEntropyLoss()), rows_of_numbers()))
    assert cause.kind == "randomness"
    assert "numpy.random" in cause.explanation
    assert (np.random.get_state()[1] == before).all()


class OwnGenerator(nn.Module):
    """Noise from a generator that the model holds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)
        self.noise = np.random.default_rng(0)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x + torch.from_numpy(self.noise.standard_normal(x.T.shape).T).to(x))


def test_noise_from_a_generator_of_the_model_is_named():
    cause = only_cause(verify(OwnGenerator(), supervised(nn.CrossEntropyLoss()), rows_of_numbers()))
    assert cause.kind == "randomness"
    assert "noise" in cause.explanation


class Doubling(nn.Module):
    """Changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.mul_(2))


def test_writing_into_the_input_is_named_where_rows_run_twice():
    encode = lambda model, pair: (model(pair[0]), pair[1])  # noqa: E731
    batch = torch.randn(ROWS, 6), torch.randn(ROWS, 8)
    cause = only_cause(verify(Doubling(), Coupled(encode, info_nce()), batch))
    assert cause.kind == "inputs"
    assert "[2, 6]" in cause.explanation or "(2, 6)" in cause.explanation


class Branching(nn.Module):
    """All rows go one way or the other, by their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) if x.mean() > 0 else self.other(x)


def test_a_parameter_that_only_some_micro_batches_touch_is_named():
    inputs, targets = rows_of_numbers()
    inputs[:2] = -inputs[:2].abs()
    inputs[2:] = inputs[2:].abs()
    cause = only_cause(verify(Branching(), supervised(nn.CrossEntropyLoss()), (inputs, targets)))
    assert cause.kind == "touched"
    assert (
        "'other.weight' gets a gradient from micro-batches 0 of 3, and from the whole batch none" in cause.explanation
    )


class Averaging(nn.Module):
    """A mean over all positions, padding included."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(23, 8), nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids).mean(1))


def test_a_model_that_looks_at_padding_is_named():
    batch = texts(has_labels=False) | {"targets": torch.randint(0, 3, (ROWS,))}
    objective = Objective(lambda model, batch: F.cross_entropy(model(batch["input_ids"]), batch["targets"]))
    verdict = verify(Averaging(), objective, batch, micro_batch=Tokens(20))
    cause = only_cause(verdict)
    assert cause.kind == "padding"
    assert "a fact about the model" in cause.explanation
    by_rows = verify(Averaging(), objective, batch, micro_batch=3)
    assert by_rows.is_exact
    assert "looks at padding" in by_rows.notes[0]


class Shuffled(nn.Module):
    """Draws one number per token that is there: no dimension of the draw is the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(23, 8), nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        tokens = self.table(ids[ids != 0])
        tokens = tokens * (1 + torch.randn(len(tokens) * 7 + 1)[: len(tokens), None])
        places = (ids != 0).nonzero()[:, 0]
        return self.head(torch.zeros(len(ids), 8).to(tokens).index_add(0, places, tokens))


def test_draws_that_belong_to_no_row_could_not_be_judged_and_units_beside_them_are():
    batch = texts()["input_ids"], torch.randint(0, 3, (ROWS,))
    verdict = verify(Shuffled(), supervised(nn.CrossEntropyLoss()), batch)
    assert (verdict.finding, verdict.is_exact, verdict.causes) == ("could not be judged", False, ())
    assert "randn" in verdict.unjudged
    assert "model.eval()" in verdict.describe()
    wrong = Objective(lambda model, b: F.cross_entropy(model(b[0]), b[1]), lambda batch: 1)
    assert only_cause(verify(Shuffled(), wrong, batch)).kind == "units"


def test_a_loss_that_is_not_finite_is_named():
    inputs, targets = rows_of_numbers()
    inputs[4, 2] = torch.inf
    assert only_cause(verify(mlp(), supervised(nn.CrossEntropyLoss()), (inputs, targets))).kind == "nonfinite"


def test_units_that_no_count_gives_are_called_unknown_with_the_weights_that_would_be_right():
    def skewed(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        weights = batch[0].square().sum(1)
        return (F.cross_entropy(model(batch[0]), batch[1], reduction="none") * weights).sum() / weights.sum()

    batch = rows_of_numbers()
    wanted = batch[0][:2].square().sum() / batch[0].square().sum()
    cause = only_cause(verify(mlp(), Objective(skewed), batch))
    assert cause.kind == "unknown"
    assert f"{wanted:.4f}" in cause.explanation


def test_weights_that_do_not_sum_to_1_rule_out_units():
    def skewed(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return losses.sum() / len(losses) ** 1.5

    cause = only_cause(verify(mlp(), Objective(skewed), rows_of_numbers()))
    assert cause.kind == "not_additive"
    assert f"{(2 / ROWS) ** 1.5:.3f}" in cause.explanation
    assert "Coupled(encode, loss)" in cause.fix

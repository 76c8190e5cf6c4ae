"""Update(check="first"): a wrong objective is refused with its cause, a right one trains as if nothing had been checked."""

import copy
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from anybatch import (
    Dealt,
    ExactnessError,
    Fit,
    Objective,
    Tokens,
    Update,
    plan,
    row_dropout,
    supervised,
    verify,
    windows,
)
from tests.setups import seeded
from tests.verification.sound import GPT, LENGTH, cnn, images, mlp, next_token, rows_of_numbers, shifted, texts
from tests.verification.test_mistakes import Counting

_seeded = seeded(5)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def state_of_everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[object]:
    tensors = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]
    return [
        [tensor.detach().clone() for tensor in tensors],
        torch.get_rng_state(),
        random.getstate(),
        np.random.get_state()[1].tolist(),
        copy.deepcopy(optimizer.state_dict()),
        model.training,
    ]


def assert_same(before: object, now: object) -> None:
    if isinstance(before, torch.Tensor):
        assert torch.equal(before, now)
    elif isinstance(before, (list, tuple)):
        assert len(before) == len(now)
        for one, other in zip(before, now, strict=True):
            assert_same(one, other)
    elif isinstance(before, dict):
        assert_same(list(before.values()), list(now.values()))
    else:
        assert before == now


def dealt(batch: tuple[torch.Tensor, torch.Tensor]) -> Dealt:
    return Dealt(batch, tuple(range(len(batch[0]))), len(batch[0]))


WRONG = {
    "units": (GPT, Objective(next_token), texts, Tokens(3 * LENGTH)),
    "sum": (mlp, Objective(lambda model, b: F.cross_entropy(model(b[0]), b[1], reduction="sum")), rows_of_numbers, 4),
    "state": (Counting, supervised(nn.CrossEntropyLoss()), rows_of_numbers, 4),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_first_batch_is_refused_with_its_cause_and_nothing_is_changed(kind):
    make, objective, batch, micro_batch = WRONG[kind]
    model = make()
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer = adam(model)
    update = Update(model, optimizer, objective, micro_batch=micro_batch, check="first")
    given = batch()
    before = state_of_everything(model, optimizer)
    for _ in range(2):  # it is not forgotten after the first refusal
        with pytest.raises(ExactnessError, match=rf"(?s)nothing was changed.*cause \({kind}\).*fix: .*check='off'"):
            update(given)
    assert_same(before, state_of_everything(model, optimizer))


def test_a_checked_update_is_the_same_to_the_bit_as_one_that_is_not_checked():
    weights = []
    batch = rows_of_numbers()
    start = cnn(lambda n: nn.GroupNorm(2, n))
    pictures = images()
    for check in ("first", "off"):
        torch.manual_seed(0)
        model = copy.deepcopy(start)
        update = Update(model, adam(model), supervised(nn.CrossEntropyLoss()), micro_batch=4, check=check)
        for _ in range(3):
            update(pictures)
        weights.append(torch.nn.utils.parameters_to_vector(model.parameters()))
    assert torch.equal(*weights)
    assert len(batch) == 2


def test_sound_updates_pass_the_check():
    batch = texts()
    cases = [
        (GPT(), Objective(next_token, shifted), batch, {"micro_batch": Tokens(3 * LENGTH)}),
        (GPT(), Objective(next_token, shifted), batch, {"micro_batch": 1}),
        (cnn(nn.BatchNorm2d), supervised(nn.CrossEntropyLoss()), images(), {"micro_batch": 4, "batch_norm": "exact"}),
        (cnn(nn.BatchNorm2d), supervised(nn.CrossEntropyLoss()), images(), {"micro_batch": 4, "batch_norm": "micro"}),
        (mlp(), supervised(nn.CrossEntropyLoss()), next(iter(windows([rows_of_numbers()] * 2, 2))), {"micro_batch": 4}),
        (mlp(), supervised(nn.CrossEntropyLoss()), (torch.randn(1, 6), torch.tensor([1])), {"micro_batch": 4}),
        (mlp(), supervised(nn.CrossEntropyLoss()), rows_of_numbers(), {"micro_batch": 4, "autocast": torch.bfloat16}),
        (mlp(), supervised(nn.CrossEntropyLoss()), dealt(rows_of_numbers()), {"micro_batch": 4}),
        (row_dropout(mlp(0.2)), supervised(nn.CrossEntropyLoss()), dealt(rows_of_numbers()), {"micro_batch": 4}),
        (mlp(), supervised(nn.CrossEntropyLoss()), rows_of_numbers(), {"micro_batch": Fit("1GiB")}),
        (mlp(), supervised(nn.CrossEntropyLoss()), rows_of_numbers(), {"micro_batch": "auto"}),
    ]
    for model, objective, given, options in cases:
        assert Update(model, adam(model), objective, check="first", **options)(given).applied


def test_verify_takes_what_an_update_takes():
    batch, objective = rows_of_numbers(), supervised(nn.CrossEntropyLoss())
    assert verify(mlp(), objective, dealt(batch)).is_exact
    assert plan(mlp(), None, objective, dealt(batch), memory="1GiB").rows == len(batch[0])
    assert verify(mlp(), objective, batch, micro_batch=Fit("1GiB")).is_exact
    assert verify(mlp(), objective, batch, micro_batch="auto").is_exact
    assert verify(row_dropout(mlp(0.2)), objective, batch).is_exact


def test_one_row_in_batch_norm_is_a_finding_and_no_crash():
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    inputs, targets = rows_of_numbers()
    verdict = verify(model, supervised(nn.CrossEntropyLoss()), (inputs[:4], targets[:4]))
    assert [cause.kind for cause in verdict.causes] == ["batch_norm"]

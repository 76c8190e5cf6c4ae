"""Who is told of an update: once, after it, and only where it was applied."""

import itertools
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from anybatch import Update, UpdateError, plan, supervised

BATCHES = [
    (torch.randn(12, 3, generator=torch.Generator().manual_seed(seed)), torch.arange(12) % 2) for seed in range(4)
]
BAD = (torch.full((12, 3), torch.inf), torch.arange(12) % 2)


def made(**options):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return Update(model, optimizer, supervised(nn.CrossEntropyLoss()), micro_batch=5, on_nonfinite="skip", **options)


def test_a_callback_gets_the_result_when_the_weights_are_new():
    seen = []
    update = made(on_update=lambda result: seen.append((result, update.model.weight.detach().clone())))
    before = update.model.weight.detach().clone()
    result = update(BATCHES[0])
    assert seen[0][0] is result
    assert torch.equal(seen[0][1], update.model.weight)
    assert not torch.equal(seen[0][1], before)


def test_an_update_that_is_not_applied_tells_nobody():
    seen = []
    update = made(on_update=[seen.append, lambda result: seen.append(None)])
    assert not update(BAD).applied
    assert seen == []
    assert seen == [update(BATCHES[0]), None]


def test_an_average_of_the_weights_is_that_of_a_hand_written_loop_and_calling_it_for_a_skipped_update_is_not():
    def average(update):
        return AveragedModel(update.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    update = made()
    ema = average(update)
    update.on_update = (lambda result: ema.update_parameters(update.model),)
    twin = made()
    right, wrong = average(twin), average(twin)
    for batch in (*BATCHES[:2], BAD, *BATCHES[2:]):
        update(batch)
        if twin(batch).applied:
            right.update_parameters(twin.model)
        wrong.update_parameters(twin.model)
    assert torch.equal(ema.module.weight, right.module.weight)
    assert not torch.equal(ema.module.weight, wrong.module.weight)


def test_what_a_callback_raises_comes_out_and_the_update_stays_done():
    def full(result):
        raise OSError("no space left")

    update, twin = made(on_update=full), made()
    with pytest.raises(OSError, match="no space left"):
        update(BATCHES[0])
    twin(BATCHES[0])
    assert torch.equal(update.model.weight, twin.model.weight)


def test_planning_tells_nobody():
    seen = []
    update = made(on_update=seen.append)
    plan(update.model, update.optimizer, update.accumulator.objective, BATCHES[0], memory="1GiB")
    assert seen == []


@pytest.mark.parametrize("bad", [3, ["loss"], [print, None]])
def test_what_cannot_be_called_is_refused_with_an_example(bad):
    with pytest.raises(UpdateError, match=r"on_update=.*expected a function of the result, such as .*scalars"):
        made(on_update=bad)


class StandIn:
    """The part of Weights & Biases, MLflow and trackio that the docs use; they are too large to be installed for the tests."""

    def __init__(self):
        self.told = []

    def log(self, data):
        self.told.append((len(self.told) + 1, data))

    def log_metrics(self, metrics, step):
        self.told.append((step, metrics))


@pytest.mark.parametrize("name", ["Weights & Biases", "MLflow", "trackio"])
def test_the_line_of_the_docs_hands_each_logger_plain_numbers_by_update(name):
    text = (Path(__file__).parents[2] / "docs/precision.md").read_text()
    line = re.search(rf"^\| {name} \| `(lambda result: .+?)`", text, re.MULTILINE)[1]
    logger = StandIn()
    callback = eval(line, {"run": logger, "mlflow": logger, "trackio": logger, "steps": itertools.count(1)})
    update = made(on_update=callback)
    results = [update(batch) for batch in BATCHES[:2]]
    assert logger.told == [(number, result.scalars()) for number, result in enumerate(results, start=1)]
    assert {type(value) for _, told in logger.told for value in told.values()} == {float}

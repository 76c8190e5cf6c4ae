"""Who is told of an update: once, after it, and only where it was applied."""

import itertools
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from anybatch import ProgressBar, TensorBoardLogger, Update, UpdateError, plan, supervised

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


def test_tensorboard_gets_every_number_under_the_number_of_its_update(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path, updates=7)
    results = [made(on_update=logger)(BATCHES[0])]
    logger.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    for name, value in results[0].scalars().items():
        (scalar,) = events.Scalars(f"update/{name}")
        assert (scalar.step, scalar.value) == (8, pytest.approx(value, rel=1e-6))


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


class Notebook:
    """What IPython looks like from the kernel of a notebook."""

    def __init__(self):
        self.shown = []
        self.display = SimpleNamespace(HTML=str, display=self._display)

    def get_ipython(self):
        return SimpleNamespace(kernel=object())

    def _display(self, html, display_id):
        assert display_id
        self.shown.append(html)
        return SimpleNamespace(update=self.shown.append)


def test_progress_is_one_bar_that_moves_in_a_notebook(monkeypatch):
    notebook, times = Notebook(), iter([0.0, 1.0, 1.01, 2.0, 2.01])
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    update = made(on_update=ProgressBar(4, clock=lambda: next(times)))
    for batch in BATCHES:
        update(batch)
    assert [html.split('max="4"')[0] for html in notebook.shown] == [f'<progress value="{n}" ' for n in (1, 3, 4)]
    assert "update 3 of 4, loss 0." in notebook.shown[1]
    assert "1.5/s, 1 s left" in notebook.shown[1]
    assert "done" in notebook.shown[2]


def test_progress_is_one_line_on_a_terminal_and_nothing_in_a_log(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "IPython", None)
    made(on_update=ProgressBar(1))(BATCHES[0])
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    made(on_update=ProgressBar(1))(BATCHES[0])
    assert capsys.readouterr().err.startswith("\r\x1b[Kupdate 1 of 1, loss 1.")

"""`train --memory`: a task that is ten times too large for the limit trains inside it, measured."""

import json

import pytest

from anybatch.app.cli.main import run
from anybatch.app.records.run_folder import RunFolder

LARGE_TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from anybatch import Task, supervised


def task():
    inputs = torch.randn(2048, 16, 4, generator=torch.Generator().manual_seed(1))
    model = nn.Sequential(nn.Linear(4, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 1))
    data = TensorDataset(inputs, inputs.sum(2, keepdim=True))
    return Task(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        objective=supervised(nn.MSELoss()),
        training=data,
        validation=data,
        batch_size=2048,
        micro_batch=2048,
        validation_batch=64,
        epochs=4,
    )
"""


@pytest.fixture
def large_task(tmp_path):
    path = tmp_path / "large.py"
    path.write_text(LARGE_TASK)
    return str(path)


def peak_and_losses(folder):
    lines = RunFolder(folder).read_metrics()
    (memory,) = [line for line in lines if line["event"] == "memory"]
    return memory["peak_bytes"], [line["loss"] for line in lines if line["event"] == "update"]


def test_a_task_ten_times_larger_than_the_limit_finishes_inside_it(tmp_path, large_task, capsys):
    assert run(["train", large_task, "--out", "whole", "-q"]) == 0
    whole, losses = peak_and_losses(tmp_path / "whole")
    limit = whole // 10
    assert run(["train", large_task, "--memory", f"{limit}B", "--out", "limited"]) == 0
    peak, limited_losses = peak_and_losses(tmp_path / "limited")
    assert peak <= limit
    assert limited_losses == pytest.approx(losses, rel=1e-4)
    text = capsys.readouterr().out
    assert "cut by Fit(" in text
    assert "rows per micro-batch at most, predicted to need" in text
    found = json.loads((tmp_path / "limited" / "run.json").read_text())
    assert found["settings"]["memory"] == limit


def test_a_limit_that_not_even_a_row_fits_into_is_one_line_with_the_need(large_task, capsys):
    assert run(["train", large_task, "--micro-batch", "20KB", "--out", "none", "-q"]) != 0
    assert "a single row is predicted to need" in capsys.readouterr().err

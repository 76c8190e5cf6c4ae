import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

SMALL_TASK_FILE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from anybatch import Task, supervised


def task():
    inputs = torch.randn(40, 3, generator=torch.Generator().manual_seed(1))
    model = nn.Linear(3, 1)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    return Task(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        objective=supervised(nn.MSELoss()),
        training=data,
        validation=data,
        batch_size=16,
        micro_batch=4,
        epochs=4,
    )
"""


@pytest.fixture
def task_file(tmp_path: Path) -> Path:
    """A task of the user's own."""
    path = tmp_path / "mine.py"
    path.write_text(SMALL_TASK_FILE)
    return path


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run folders go below the test's own folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _as_in_a_terminal() -> Iterator[None]:
    """Interrupts are taken, whatever started pytest: under nohup and some runners they are ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)

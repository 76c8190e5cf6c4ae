"""The walk of a plain update: how many files and functions it enters before its first backward."""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import anybatch
from anybatch import Rows, Update, supervised

ROOT = str(Path(anybatch.__file__).parent)
FILES, FUNCTIONS = 18, 90


def entered_before_backward(model: nn.Module, **options: Any) -> set[tuple[str, str]]:
    """Profile the third update of 4 micro-batches; the functions of anybatch that it enters before the first backward."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    update = Update(model, optimizer, supervised(nn.CrossEntropyLoss()), micro_batch=Rows(16), **options)
    batch = torch.randn(64, 10), torch.randint(0, 2, (64,))
    update(batch)
    update(batch)
    entered: set[tuple[str, str]] = set()
    is_over = False

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal is_over
        is_over = is_over or (event == "c_call" and argument.__name__ == "run_backward")
        code = frame.f_code
        if event == "call" and not is_over and code.co_filename.startswith(ROOT) and code.co_name[0] != "<":
            entered.add((code.co_filename, code.co_qualname))

    sys.setprofile(profile)
    try:
        update(batch)
    finally:
        sys.setprofile(None)
    assert is_over
    return entered


def test_a_plain_update_enters_few_files_and_functions_before_its_first_backward():
    entered = entered_before_backward(nn.Linear(10, 2))
    assert len({file for file, _ in entered}) <= FILES
    assert len(entered) <= FUNCTIONS, sorted(entered)


def test_an_option_that_is_used_shows_in_the_walk():
    plain = entered_before_backward(nn.Linear(10, 2))
    batch_norm = nn.Sequential(nn.Linear(10, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    with_hook = entered_before_backward(batch_norm, batch_norm="micro")
    assert not any("batch_norm" in file for file, _ in plain)
    assert any("batch_norm" in file for file, _ in with_hook - plain)

"""Which ranks a finding is of, rows that samplers double or drop, and losses that are read."""

import json

import pytest

from anybatch.doctor import describe
from anybatch.doctor.judging import judge
from anybatch.doctor.log import Log
from tests.doctor.test_judging import CLEARED, OPTIMIZER, PLACE, _pass, _step
from tests.processes.forked import run_function

LOADER = {"event": "epoch", "loader": 0, "number": 1, "whole": 2, "dataset": 1000, "place": {**PLACE, "line": 3}}


def _rank(rank, *, weight=0.5, marks=(1.0, 2.0), sync=True, **sampling):
    passes = [
        _pass(serial, weight, batch=[0, 1, serial], mark=mark, sync=[sync and bool(serial)] * 2)
        for serial, mark in enumerate(marks)
    ]
    begun = {"event": "start", "rank": rank, "world": 2}
    return Log(f"{rank}", (begun, OPTIMIZER, {**LOADER, **sampling}, *passes, _step(), CLEARED, {"event": "end"}))


def _found(*logs):
    return {one.kind: one for one in judge(list(logs)).findings}


def test_a_finding_says_which_ranks_it_is_of():
    both = _found(_rank(0, weight=1.0), _rank(1, weight=1.0, marks=(3.0, 4.0)))["not-divided"]
    one = _found(_rank(0), _rank(1, weight=1.0, marks=(3.0, 4.0)))
    assert both.evidence["ranks"] == [0, 1]
    assert one["not-divided"].evidence["ranks"] == [1]
    assert "not-divided  /a/train.py:7  (rank 1)" in describe(judge([_rank(0), _rank(1, weight=1.0, marks=(3.0, 4.0))]))


def test_batches_that_two_ranks_share_are_rows_repeated_and_those_of_their_own_are_not():
    again = _found(_rank(0), _rank(1))["rows-repeated"]
    assert (again.severity, again.line) == ("error", 3)
    assert "2 of 2 batches of rank 1 are the very batches of rank 0" in again.message
    assert "rows-repeated" not in _found(_rank(0), _rank(1, marks=(3.0, 4.0)))
    assert "rows-repeated" not in _found(_rank(0, marks=(5.0, 5.0)), _rank(1, marks=(5.0, 5.0)))  # made-up data


@pytest.mark.parametrize(
    ("dealt", "kind", "told"),
    [
        (1002, "rows-repeated", "2 of 1,000 rows count twice"),
        (998, "tail-dropped", "2 of 1,000 rows are dealt to no rank"),
    ],
)
def test_rows_that_a_sampler_doubles_or_drops_are_counted(dealt, kind, told):
    found = _found(_rank(0, dealt=dealt), _rank(1, marks=(3.0, 4.0), dealt=dealt))[kind]
    assert found.severity == "warning"
    assert told in found.message


LOOP = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
running = 0.0
for i in range(8):
    loss = nn.functional.mse_loss(model(torch.randn(4, 3)), torch.zeros(4, 1)) / 2
    {before}
    loss.backward()
    {after}
    if i % 2:
        optimizer.step()
        optimizer.zero_grad()
{end}
"""


def watch_reading(code: str, out: str) -> None:
    import linecache

    from anybatch import Doctor

    name = f"{out}/loop.py"
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    with Doctor() as doctor:
        exec(compile(code, name, "exec"), {})
    with open(f"{out}/found.json", "w") as file:
        json.dump([[one.kind, one.line] for one in doctor.findings if one.kind == "loss-logged-divided"], file)


@pytest.mark.parametrize(
    ("before", "after", "end", "line"),
    [
        ("pass", "print(loss.item())", "", 13),
        ("print(float(loss))", "pass", "", 11),
        ("pass", "print(f'{loss:.3f}')", "", 13),
        ("pass", "running += loss.detach().item()", "print(running / 8)", 13),
        ("pass", "print(loss.item() * 2)", "", None),
        ("pass", "running += loss.item()", "print(running * 2 / 8)", None),
        ("pass", "running += loss.item()", "print(running)", None),
        ("pass", "pass", "", None),
    ],
)
def test_a_divided_loss_that_is_logged_as_it_is_is_told_and_one_that_is_mended_is_not(
    before, after, end, line, tmp_path
):
    done = run_function(watch_reading, LOOP.format(before=before, after=after, end=end), str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found == ([] if line is None else [["loss-logged-divided", line]])


ONE_LOSS_PER_ROW = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(3, 5)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(8):
    targets = torch.randint(0, 5, (4,))
    targets[:{ignored}] = -100
    losses = nn.functional.cross_entropy(model(torch.randn(4, 3)), targets, reduction="none")
    (losses.sum() / (targets != -100).sum() / 2).backward()
    if i % 2:
        optimizer.step()
        optimizer.zero_grad()
"""


def watch_rows(code: str, out: str) -> None:
    from anybatch import Doctor

    with Doctor() as doctor:
        exec(compile(code, f"{out}/loop.py", "exec"), {})
    parts = [part for update in doctor.diagnosis.as_json()["updates"] for part in update["micro_batches"]]
    with open(f"{out}/found.json", "w") as file:
        json.dump([[part["terms"], part["weight"]] for part in parts], file)


@pytest.mark.parametrize("ignored", [0, 1])
def test_the_sum_of_one_loss_per_row_has_a_term_for_each_target_that_is_not_ignored(ignored, tmp_path):
    done = run_function(watch_rows, ONE_LOSS_PER_ROW.format(ignored=ignored), str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found == [[4 - ignored, pytest.approx(0.5)]] * 8

"""anybatch verify: exit code 0 exact, 1 not, 2 usage; JSON alone on stdout when asked for."""

import json

import pytest

from anybatch.app.cli.main import run

WRONG = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
from anybatch import Objective, Task


def task():
    data = TensorDataset(torch.randn(40, 3), torch.arange(40) % 3)
    model = nn.Linear(3, 3)
    return Task(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        objective=Objective(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="sum")),
        training=data,
        validation=data,
        batch_size=16,
        micro_batch=4,
    )
"""


def test_an_exact_task_leaves_0_and_a_page(tmp_path, capsys):
    assert run(["verify", "textbook", "--batch-size", "12", "--micro-batch", "5", "--out", "out"]) == 0
    text = capsys.readouterr().out
    assert "exact: 12 rows, accumulated against the whole batch in one go" in text
    assert "as configured: Rows(size=5)" in text
    found = json.loads((tmp_path / "out" / "verify.json").read_text())
    assert found["is_exact"] is True
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert (record["kind"], record["status"], record["summary"]["exact"]) == ("verify", "finished", True)
    assert "textbook is exact: in 2 cuts, 12 rows" in (tmp_path / "out" / "report.html").read_text()


def test_a_wrong_task_leaves_1_and_names_the_cause_and_the_fix(tmp_path, capsys):
    (tmp_path / "wrong.py").write_text(WRONG)
    assert run(["verify", "wrong.py", "--out", "out"]) == 1
    text = capsys.readouterr().out
    assert "cause (sum): The loss is a sum over rows, not a mean" in text
    assert "fix: Say so: Objective(loss, units, reduction='sum')" in text


def test_json_is_all_that_is_printed(tmp_path, capsys):
    (tmp_path / "wrong.py").write_text(WRONG)
    assert run(["verify", "wrong.py", "--json", "--memory", "1GiB"]) == 1
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["causes"][0]["kind"] == "sum"
    assert found["rows"] == found["rows_given"] == 16
    assert captured.err == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["verify", "nowhere.py"], "there is no task file nowhere.py"),
        (
            ["verify", "textbook", "--memory", "lots"],
            "'lots' is no memory size: expected a number above 0 with its unit",
        ),
        (["verify", "textbook", "--batch-size", "1"], "give a batch of 2 rows or more"),
        (["verify", "textbook", "--batch-size", "0"], "--batch-size 0: expected a whole number"),
        (["verify"], "TASK"),
    ],
)
def test_wrong_usage_leaves_2(capsys, arguments, said):
    assert run(arguments) == 2
    assert said in capsys.readouterr().err


UNJUDGED = WRONG.replace("nn.Linear(3, 3)", "nn.Sequential(nn.Linear(3, 3), nn.RReLU())").replace(
    ', reduction="sum"', ""
)


def test_a_task_that_cannot_be_judged_leaves_3_and_its_page_says_why_by_its_name(tmp_path, capsys):
    (tmp_path / "drawing.py").write_text(UNJUDGED)
    assert run(["verify", "drawing.py", "--out", "out"]) == 3
    assert "could not be judged: 16 rows" in capsys.readouterr().out
    page = (tmp_path / "out" / "report.html").read_text()
    assert "drawing.py could not be judged: 16 rows" in page
    assert "<h1>drawing.py</h1>" in page


def test_the_page_shows_what_every_row_counted_for(tmp_path):
    (tmp_path / "means.py").write_text(WRONG.replace(', reduction="sum")),', "), lambda batch: 1),"))
    assert run(["verify", "means.py", "--out", "out"]) == 1
    page = (tmp_path / "out" / "report.html").read_text()
    assert "The weight of every row" in page
    cells = {look: page.count(f'class="{look}"') for look in ("more", "right", "less")}
    assert cells == {"more": 5, "right": 4, "less": 7}  # micro-batches of 2, 3, 4 and 7 rows, a quarter each
    assert "should weigh" in page

import json

import pytest

from anybatch.cli.main import run


def test_a_task_is_tried_for_a_while_and_its_batch_judged(tmp_path, task_file, capsys):
    arguments = ["advise", str(task_file), "--updates", "12", "--ranks", "4", "--out", "out"]
    assert run(arguments) == 0
    text = capsys.readouterr().out
    found = json.loads((tmp_path / "out" / "advice.json").read_text())
    assert found["noise_scale"] > 0
    assert "Doubling 16 to 32: about" in text
    assert "16 (yours)" in text
    assert "on 4 ranks, their all-reduce included" in text
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Is the batch worth it?" in page
    assert "To the same loss, by batch" in page


def test_a_run_that_measured_is_judged_by_what_it_recorded(tmp_path, task_file, capsys):
    assert run(["train", str(task_file), "--noise", "2", "--out", "out", "-q"]) == 0
    assert "Noise scale, in rows" in (tmp_path / "out" / "report.html").read_text()
    updates = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    measured = [one["noise_scale"] for one in updates if one["event"] == "update"]
    assert measured[:8] == [None] * 8
    assert None not in measured[8:]
    assert run(["advise", "out"]) == 0
    assert "Doubling 16 to 32: about" in capsys.readouterr().out
    assert "Is the batch worth it?" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["train", "--updates", "2"], "train with --noise 8"),
        (["advise", "--micro-batch", "16", "--updates", "3"], "of 5"),
    ],
)
def test_where_nothing_can_be_said_the_reason_is_told(task_file, capsys, arguments, reason):
    run([arguments[0], str(task_file), *arguments[1:], "--out", "out", "-q"])
    assert run(["advise", "out"] if arguments[0] == "train" else ["advise", str(task_file), *arguments[1:]]) == 1
    assert reason in capsys.readouterr().out

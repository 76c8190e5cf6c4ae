import json

import pytest

from anybatch.app.cli.main import run


def test_compare_leaves_its_numbers_and_says_what_it_found(tmp_path, capsys):
    assert run(["compare", "textbook", "--epochs", "2", "--seeds", "2", "--out", "out"]) == 0
    text = capsys.readouterr().out
    found = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert [arm["name"] for arm in found["arms"]] == ["small batch", "usual loop", "exact batch", "exact + rule"]
    assert [arm["lr"] for arm in found["arms"]] == pytest.approx([0.1, 0.1, 0.1, 0.4])
    assert [len(arm["runs"]) for arm in found["arms"]] == [2] * 4
    assert found["metric"] == "accuracy"
    for sentence in found["findings"]:
        assert f"- {sentence}" in text
    assert "learns more slowly per epoch" in text
    assert "leaves 40 of 1,000 rows out" in text
    assert json.loads((tmp_path / "out" / "run.json").read_text())["kind"] == "compare"
    assert (tmp_path / "out" / "report.html").exists()
    assert "±" in text


def test_compare_takes_a_task_that_is_judged_by_its_loss(tmp_path, task_file, capsys):
    assert run(["compare", str(task_file), "--epochs", "1", "--seeds", "1", "--out", "out"]) == 0
    assert "One seed" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "compare.json").read_text())["metric"] == "validation loss"


def test_trace_shows_stages_and_layers_and_keeps_them(tmp_path, capsys):
    assert run(["trace", "textbook", "--out", "out", "--clip-norm", "0.1"]) == 0
    text = capsys.readouterr().out
    for stage in ("load", "forward", "loss", "backward", "accumulate", "clip", "step", "zero"):
        assert f" {stage}" in text
    assert "micro-batch 3" in text
    assert "one sample, layer by layer" in text
    found = json.loads((tmp_path / "out" / "trace.json").read_text())
    assert (
        found["layers"][0] | {"name": "model", "kind": "Linear", "in": [[1, 10]], "out": [[1, 2]]} == found["layers"][0]
    )
    assert found["stages"][0].keys() == {"stage", "micro_batch", "title", "facts", "values"}
    assert (tmp_path / "out" / "report.html").exists()


def test_report_makes_the_page_again(tmp_path, capsys):
    run(["trace", "textbook", "--out", "out", "-q"])
    page = tmp_path / "out" / "report.html"
    page.unlink()
    assert run(["report", "out"]) == 0
    assert page.exists()
    assert capsys.readouterr().out == "page: out/report.html\n"

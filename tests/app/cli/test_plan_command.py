import json

import pytest

from anybatch.app.cli.main import run


def test_plan_says_what_fits_and_leaves_a_page(tmp_path, task_file, capsys):
    assert run(["plan", str(task_file), "--memory", "1MiB", "--device", "cuda", "--out", "out"]) == 0
    text = capsys.readouterr().out
    assert "The whole batch of 16 rows fits in one piece" in text
    assert "rows" in text
    assert "parameters" in text
    planned = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert planned["micro_batch"] == 16
    assert planned["sizes"][-1]["peak"] == planned["whole_bytes"]
    assert "Peak memory by micro-batch" in (tmp_path / "out" / "report.html").read_text()


def test_a_plan_that_does_not_fit_exits_with_1_and_names_the_need(tmp_path, task_file, capsys):
    assert run(["plan", str(task_file), "--memory", "16B", "--json"]) == 1
    planned = json.loads(capsys.readouterr().out)
    assert planned["fits"] is False
    assert planned["least_bytes"] > 16
    assert not (tmp_path / "runs").exists()


def test_a_size_that_is_none_is_refused_before_anything_is_loaded(task_file, capsys):
    assert run(["plan", str(task_file), "--memory", "lots"]) == 2
    assert "'lots' is no memory size" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option", [["--ranks", "64"], ["--ranks=64", "--bandwidth", "25GB/s"], ["--flops", "85TFLOP/s"]]
)
def test_a_plan_for_many_ranks_is_gone_and_says_where_it_went(option, capsys):
    assert run(["plan", "textbook", *option]) == 2
    assert f"no {option[0].partition('=')[0]} any more" in (said := capsys.readouterr().err)
    assert "docs/benchmarks/scale.md" in said

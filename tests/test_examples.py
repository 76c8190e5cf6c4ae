"""Every example is short, runs as it is, and shows what it says; so do the notebooks made of three of them."""

import re
import runpy
from pathlib import Path

import nbformat
import pytest
import torch

from anybatch.app.cli.main import run
from tests.processes.torchrun import launched, script

EXAMPLES = Path(__file__).parent.parent / "examples"
NOTEBOOKS = runpy.run_path(str(EXAMPLES / "notebooks/make.py"))


@pytest.fixture(scope="module")
def printed() -> dict[str, str]:
    return {}


@pytest.fixture
def output(request, printed, capsys) -> str:
    """What the example printed, which runs once."""
    name = request.param
    if name not in printed:
        before = torch.get_default_dtype()
        try:
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        finally:
            torch.set_default_dtype(before)
        printed[name] = capsys.readouterr().out
    return printed[name]


def test_every_example_is_short():
    assert len(list(EXAMPLES.glob("*.py"))) >= 10
    assert {
        path.name: lines for path in EXAMPLES.glob("*.py") if (lines := len(path.read_text().splitlines())) > 60
    } == {}


@pytest.mark.parametrize("output", ["plain_loop"], indirect=True)
def test_the_loop_before_loses_rows_and_the_one_after_does_not(output):
    assert "before: learnt from 1792 of 1797 rows" in output
    assert "after:  learnt from 1797 of 1797 rows" in output
    assert float(re.search(r"at most (\S+) off", output)[1]) < 1e-6


@pytest.mark.parametrize("output", ["images"], indirect=True)
def test_digits_are_learnt_in_mixed_precision_and_so_is_their_average(output):
    shares = [float(share) for share in re.findall(r"([\d.]+)%", output.splitlines()[-1])]
    assert len(shares) == 2
    assert min(shares) > 85


@pytest.mark.parametrize("output", ["causal_lm"], indirect=True)
def test_text_is_learnt_with_less_padding(output):
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]
    assert losses == sorted(losses, reverse=True)
    assert min(int(saved) for saved in re.findall(r"(\d+)% less", output)) > 5


@pytest.mark.parametrize("output", ["clip_like"], indirect=True)
def test_halves_of_digits_find_each_other_among_256(output):
    assert output.count("over 256 pairs in 8 micro-batches") == 5
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]
    assert losses[-1] < losses[0] - 1


@pytest.mark.parametrize("output", ["batch_norm"], indirect=True)
def test_batch_norm_is_exact_where_it_is_asked_for_and_far_off_by_micro_batch(output):
    exact, micro = (float(error) for error in re.findall(r"weights (\S+) from", output))
    assert exact < 1e-12
    assert micro > 1e-3


@pytest.mark.parametrize("output", ["several_terms"], indirect=True)
def test_both_terms_are_learnt_and_reported(output):
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+) of label [\d.]+, image [\d.]+", output)]
    assert len(losses) == 3
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("output", ["memory_limited"], indirect=True)
def test_the_measured_peak_is_within_the_limit(output):
    assert float(re.search(r"measured: ([\d.]+) MiB", output)[1]) <= 24


@pytest.mark.parametrize("output", ["textbook"], indirect=True)
def test_the_textbook_is_exact_in_every_epoch(output):
    assert all(float(line.split()[-1]) < 5e-7 for line in output.splitlines()[1:])


def test_two_ranks_learn_from_every_row_once(tmp_path):
    said = tmp_path / "said"
    launched(script, EXAMPLES / "two_ranks.py", said, name="two ranks").result()
    assert "569 rows on 2 ranks" in said.read_text()


def test_a_task_of_ones_own_trains(tmp_path):
    assert (
        run(["train", str(EXAMPLES / "own_task.py"), "--epochs", "1", "--out", str(tmp_path / "run"), "--quiet"]) == 0
    )
    assert (tmp_path / "run/report.html").is_file()


@pytest.mark.parametrize("name", NOTEBOOKS["NAMES"])
def test_a_notebook_is_its_example_which_runs_above(name):
    stored = nbformat.read(EXAMPLES / f"notebooks/{name}.ipynb", as_version=4)
    book = NOTEBOOKS["notebook_of"](name)
    assert [cell.source for cell in stored.cells] == [cell.source for cell in book.cells]
    assert any(cell.get("outputs") for cell in stored.cells)
    nbformat.validate(book)


def test_a_notebook_runs():
    book = NOTEBOOKS["executed"](NOTEBOOKS["notebook_of"]("plain_loop"))
    assert book.cells[-1].outputs[0].text.startswith("before")

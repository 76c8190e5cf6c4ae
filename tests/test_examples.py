"""Every example is short, runs as it is, and prints what it promises; so do the notebooks made of three of them."""

import re
import runpy
from pathlib import Path

import nbformat
import pytest

from anybatch.app.cli.main import run
from tests.processes.torchrun import launched, script

EXAMPLES = Path(__file__).parent.parent / "examples"
NOTEBOOKS = runpy.run_path(str(EXAMPLES / "notebooks/make.py"))
USUAL_ERRORS = {
    "image_classifier": 0.05,
    "causal_lm": 0.05,
    "detector": 0.5,
    "clip": 0.05,
    "diffusion": 0.1,
    "gan": 0.1,
    "ddp": 0.01,
    "fsdp2": 0.05,
}
"""The least error that the usual loop of each example makes."""
ON_RANKS = {"ddp", "fsdp2"}


@pytest.fixture(scope="module")
def printed() -> dict[str, str]:
    return {}


@pytest.fixture
def output(request, printed, tmp_path, capsys) -> str:
    """Text that the example prints; each runs once."""
    name = request.param
    if name not in printed and name in ON_RANKS:
        launched(script, EXAMPLES / f"{name}.py", tmp_path / "said", name=name).result()
        printed[name] = (tmp_path / "said").read_text()
    elif name not in printed:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        printed[name] = capsys.readouterr().out
    return printed[name]


def line_of(output: str, name: str) -> str:
    return next(line for line in output.splitlines() if line.startswith(name))


def errors_in(line: str) -> list[float]:
    return [float(error) for error in re.findall(r"\d+e[+-]\d+", line)]


def test_every_example_is_about_a_page():
    assert len(list(EXAMPLES.glob("*.py"))) >= 15
    lines = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert {name: count for name, count in lines.items() if count > 105} == {}


def test_the_page_of_examples_names_each_of_them():
    page = (EXAMPLES.parent / "docs/examples.md").read_text()
    assert set(re.findall(r"\[(\w+\.py)\]", page)) == {path.name for path in EXAMPLES.glob("*.py")}


@pytest.mark.parametrize(("output", "usual"), USUAL_ERRORS.items(), indirect=["output"], ids=USUAL_ERRORS)
def test_the_usual_loop_is_off_and_anybatch_has_the_gradient_of_the_whole_batch(output, usual):
    assert min(errors_in(line_of(output, "usual loop"))) >= usual
    assert max(errors_in(line_of(output, "anybatch"))) < 2e-6
    if "whole batch  " in output:  # the training of both ends in the same place
        ends = [line_of(output, name).split()[-1] for name in ("whole batch", "anybatch")]
        assert ends[0] == ends[1]


@pytest.mark.parametrize("output", ["causal_lm"], indirect=True)
def test_text_of_similar_length_needs_less_padding(output):
    assert int(re.search(r"(\d+)% fewer", output)[1]) > 40


@pytest.mark.parametrize("output", ["ddp"], indirect=True)
def test_ddp_learns_from_every_row_once_and_the_sampler_of_torch_does_not(output):
    assert "ran 570 rows of 569" in line_of(output, "usual loop")
    assert "ran 569 rows of 569" in line_of(output, "anybatch")


@pytest.mark.parametrize("output", ["plain_loop"], indirect=True)
def test_the_usual_loop_loses_rows_and_anybatch_does_not(output):
    assert "learned from 1792 of 1797 rows" in line_of(output, "usual loop")
    assert "learned from 1797 of 1797 rows" in line_of(output, "anybatch")
    assert max(errors_in(output)) < 1e-6


@pytest.mark.parametrize("output", ["mixed_precision"], indirect=True)
def test_digits_are_learned_in_mixed_precision_and_so_is_the_average_of_the_weights(output):
    shares = [float(share) for share in re.findall(r"([\d.]+)%", output.splitlines()[-1])]
    assert len(shares) == 2
    assert min(shares) > 85


@pytest.mark.parametrize("output", ["several_terms"], indirect=True)
def test_both_terms_are_learned_and_reported(output):
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+) = label [\d.]+, image [\d.]+", output)]
    assert len(losses) == 3
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("output", ["memory_limited"], indirect=True)
def test_the_measured_peak_is_within_the_limit(output):
    assert float(re.search(r"measured: ([\d.]+) MiB", output)[1]) <= 24


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
    assert book.cells[-1].outputs[0].text.startswith("usual loop")

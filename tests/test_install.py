"""What is built can be installed beside torch alone, and runs; with `[all]` the command line does too."""

import re
import subprocess
import sys
import venv
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
SNIPPET = re.search(r"```python\n(.*?)```\n```text\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(folder),
        str(ROOT),
    ]
    subprocess.run(build, check=True)
    (built,) = folder.glob("*.whl")
    return built


def needed(name: str, extra: str = "") -> set[str]:
    """The distributions that pip would install for `name[extra]`, itself included."""
    found, waiting = set(), [(name, extra)]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in found:
            continue
        try:
            requirements = distribution(name).requires or []
        except PackageNotFoundError:  # torch's own accelerator packages, which this build of it does without
            continue
        found.add((name, extra))
        for requirement in map(Requirement, requirements):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                waiting += [(requirement.name, of) for of in (requirement.extras or {""})]
    return {name for name, _ in found}


def clean_environment(folder: Path, wheel: Path, extra: str) -> Path:
    """A Python that sees the wheel, what it declares to need, and nothing else of this one."""
    venv.create(folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    ZipFile(wheel).extractall(packages)
    for name in needed("anybatch", extra) - {"anybatch"}:
        for file in distribution(name).files or ():
            top = packages / file.parts[0]
            if file.parts[0] not in ("..", "__pycache__") and not top.exists():
                top.symlink_to(distribution(name).locate_file(file.parts[0]))
    return folder / "bin/python"


def run(python: Path, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(python), *arguments], capture_output=True, text=True, cwd=folder, env={"OMP_NUM_THREADS": "1"}
    )


def test_beside_torch_alone_the_first_snippet_of_the_readme_runs(wheel, tmp_path):
    python = clean_environment(tmp_path / "clean", wheel, "")
    assert SNIPPET is not None
    done = run(python, "-W", "ignore", "-c", SNIPPET[1], folder=tmp_path)
    assert (done.stdout, done.returncode) == (SNIPPET[2], 0), done.stderr
    assert run(python, "-c", "import typer", folder=tmp_path).returncode == 1  # it is clean


def test_the_command_line_without_its_extra_says_what_to_install(wheel, tmp_path):
    python = clean_environment(tmp_path / "clean", wheel, "")
    done = run(python, "-m", "anybatch", "train", "textbook", folder=tmp_path)
    assert done.returncode == 2
    assert "pip install 'anybatch[cli]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_with_all_extras_the_command_line_trains(wheel, tmp_path):
    python = clean_environment(tmp_path / "clean", wheel, "all")
    done = run(python, "-m", "anybatch", "train", "textbook", "--epochs", "1", "--out", "run", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run/report.html").is_file()


def test_the_readme_of_the_package_has_pictures_and_links_that_show_elsewhere(wheel):
    with ZipFile(wheel) as files:
        (metadata,) = (name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
        text = files.read(metadata).decode()
    assert "# anybatch" in text
    assert "raw.githubusercontent.com" in text
    assert re.findall(r"\]\((?!https://)[^)]*\)", text) == []
    assert re.findall(r'src="(?!https://)[^"]*"', text) == []

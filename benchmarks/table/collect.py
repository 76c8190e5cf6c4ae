"""Every contender on every case, each contender in processes of its own: frameworks keep state, and some set up ranks."""

import importlib.metadata
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch

import anybatch
from benchmarks.table.case import Case
from benchmarks.table.contenders import CONTENDERS, Contender
from benchmarks.table.judge import Outcome, judge
from benchmarks.table.witness import Run
from benchmarks.table.worker import DONE

Cell = Outcome | str
"""What was measured, or why nothing could be."""
Told = Callable[[Contender, Case, Cell], None]


def collect(cases: Sequence[Case], told: Told) -> dict[str, dict[str, Cell]]:
    """The table, by case and contender; `told` hears of each cell when it is there."""
    table: dict[str, dict[str, Cell]] = {case.name: {} for case in cases}

    def fill(contender: Contender, case: Case, cell: Cell) -> None:
        table[case.name][contender.title] = cell
        told(contender, case, cell)

    for contender in CONTENDERS:
        alone: list[int] = []
        launches = [(1, alone)]
        for number, case in enumerate(cases):
            reason = contender.refuses(case)
            if case.kind not in contender.kinds:
                continue
            if reason is not None:
                fill(contender, case, reason)
            elif case.ranks == 1:
                alone.append(number)
            else:
                launches.append((case.ranks, [number]))  # ranks meet once per process
        for ranks, numbers in launches:
            for number, cell in run(contender, cases, numbers, ranks):
                fill(contender, cases[number], cell)
    return table


def run(contender: Contender, cases: Sequence[Case], numbers: list[int], ranks: int) -> Iterator[tuple[int, Cell]]:
    """The cells of one contender on so many ranks, one after the other."""
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "errors").open("w+") as errors:
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command = [sys.executable, *(launch if ranks > 1 or contender.needs_launcher else [])]
        command += ["-m", "benchmarks.table.worker", contender.name, folder, *map(str, numbers)]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as process:
            try:
                yield from cells(process.stdout or (), cases, Path(folder), ranks)
            except BaseException:
                process.terminate()
                raise
        if process.returncode:
            errors.seek(0)
            raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{errors.read()[-3000:]}")


def cells(lines: Iterable[str], cases: Sequence[Case], folder: Path, ranks: int) -> Iterator[tuple[int, Cell]]:
    """A cell as soon as all ranks say that they are done with its case."""
    done = Counter[int]()
    for line in lines:
        if line.startswith(DONE):
            number = int(line.removeprefix(DONE))
            done[number] += 1
            if done[number] == ranks:
                yield number, judge(cases[number], load_runs(folder, number, ranks))


def load_runs(folder: Path, number: int, ranks: int) -> list[Run]:
    """What all ranks left of one case."""
    return [torch.load(folder / f"{number}.{rank}.pt", weights_only=False) for rank in range(ranks)]


def versions() -> dict[str, str]:
    """Of all that takes part."""
    packages = ["torch", *(contender.package for contender in CONTENDERS if contender.package is not None)]
    found = {package: importlib.metadata.version(package) for package in packages}
    return found | (
        {"anybatch": anybatch.__version__} if "anybatch" in found else {}
    )  # what runs, not what was installed once

"""The table as JSON, as Markdown, and in the page about it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.table.collect import Cell
from benchmarks.table.judge import Outcome

BEGIN, END = "<!-- the table: written by python -m benchmarks.exactness -->", "<!-- end of the table -->"
Table = Mapping[str, Mapping[str, Cell]]
FLOOR = "whole batch at once"
LOOPS = (FLOOR, "textbook loop", "Accelerate", "HF Trainer", "Lightning", "DeepSpeed", "cached loss", "anybatch")


def _beside(*frameworks: str) -> tuple[str, ...]:
    return (FLOOR, *(column for name in frameworks for column in (name, f"{name} + anybatch")))


PARTS = (LOOPS, _beside("HF Trainer", "Lightning", "Accelerate"), _beside("TRL", "sentence-transformers"))
"""The columns of each table of the page."""


def to_json(table: Table) -> dict[str, Any]:
    """By case and contender: what was measured, or the reason why nothing was."""
    return {
        case: {name: {"empty": cell} if isinstance(cell, str) else asdict(cell) for name, cell in cells.items()}
        for case, cells in table.items()
    }


def from_json(content: Mapping[str, Any]) -> dict[str, dict[str, Cell]]:
    """The table that `to_json` was given."""
    return {
        case: {name: cell["empty"] if "empty" in cell else Outcome(**cell) for name, cell in cells.items()}
        for case, cells in content.items()
    }


def figure(error: float | None) -> str:
    """Two digits."""
    if error is None:
        return "not finite"
    return f"{error:.1e}" if error < 0.01 else f"{error:.2g}"


def remarks(cell: Outcome) -> list[str]:
    """What is wrong beside the gradient, or was asked for and is right."""
    said = []
    if cell.updates != cell.wanted_updates:
        said.append(f"{cell.updates}/{cell.wanted_updates} updates")
    if cell.nonfinite:
        said.append(f"{cell.nonfinite} updates not finite")
    if cell.dropped:
        said.append(f"{cell.dropped} rows dropped")
    if cell.repeated:
        said.append(f"{cell.repeated} rows twice")
    if cell.wanted_lr != 1:
        is_right = abs(cell.lr - cell.wanted_lr) < 1e-9
        said.append(f"LR ends at {cell.lr:.0%}" + ("" if is_right else f", not {cell.wanted_lr:.0%}"))
    return said


def parts(table: Table) -> list[dict[str, dict[str, Cell]]]:
    """The table as it is shown: ordinary loops beside anybatch, then frameworks beside themselves with anybatch in them."""
    return [found for columns in PARTS if (found := _part(table, columns))]


def _part(table: Table, columns: Sequence[str]) -> dict[str, dict[str, Cell]]:
    """These columns, of the cases that anybatch has learnt in one of them."""
    here = [name for name in columns if any(name in cells for cells in table.values())]
    found = {case: {name: cells.get(name, "") for name in here} for case, cells in table.items()}
    return {
        case: cells
        for case, cells in found.items()
        if any(isinstance(cell, Outcome) for name, cell in cells.items() if name.endswith("anybatch"))
    }


def markdown(table: Table, versions: Mapping[str, str], day: str) -> str:
    """Tables with one line per case; what is exact in every respect stands in bold."""
    named = ", ".join(f"{package} {version}" for package, version in versions.items())
    return "\n".join(
        [*(line for found in parts(table) for line in _lines(found)), f"Measured on {day} on a CPU with {named}."]
    )


def _lines(found: Table) -> list[str]:
    columns = list(next(iter(found.values())))
    lines = [f"| case | {' | '.join(columns)} |", f"| --- |{' --- |' * len(columns)}"]
    for case, cells in found.items():
        lines.append(f"| {case} | {' | '.join(_entry(cells[column]) for column in columns)} |")
    return [*lines, ""]


def _entry(cell: Cell) -> str:
    if not cell:
        return ""
    if isinstance(cell, str):
        return f"({cell})"
    error = figure(cell.error)
    return "; ".join([f"**{error}**" if cell.is_exact else error, *remarks(cell)])


def replace_table(page: str, table: str) -> str:
    """The page with this table in the place of the one before."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{table}\n{END}{rest.split(END)[1]}"

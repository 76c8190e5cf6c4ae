"""The table as JSON, as Markdown, and in the page about it."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from benchmarks.table.collect import Cell
from benchmarks.table.judge import Outcome

BEGIN, END = "<!-- the table: written by python -m benchmarks.exactness -->", "<!-- end of the table -->"
Table = Mapping[str, Mapping[str, Cell]]


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


def markdown(table: Table, versions: Mapping[str, str], day: str) -> str:
    """A table with one line per case; what is exact in every respect stands in bold."""
    columns = list(next(iter(table.values())))
    lines = [f"| case | {' | '.join(columns)} |", f"| --- |{' --- |' * len(columns)}"]
    for case, cells in table.items():
        lines.append(f"| {case} | {' | '.join(_entry(cells[column]) for column in columns)} |")
    named = ", ".join(f"{package} {version}" for package, version in versions.items())
    return "\n".join([*lines, "", f"Measured on {day} on a CPU with {named}."])


def _entry(cell: Cell) -> str:
    if isinstance(cell, str):
        return f"({cell})"
    error = figure(cell.error)
    return "; ".join([f"**{error}**" if cell.is_exact else error, *remarks(cell)])


def replace_table(page: str, table: str) -> str:
    """The page with this table in the place of the one before."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{table}\n{END}{rest.split(END)[1]}"

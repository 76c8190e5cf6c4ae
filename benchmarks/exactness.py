"""How far the gradient that the optimizer is handed lies from the whole batch's, computed at once in float64.

    python -m benchmarks.exactness [--quick]

Every case goes through the ordinary public API of each contender; see `benchmarks/table`. Writes
docs/benchmarks/exactness.json, docs/pictures/exactness.svg and the table in docs/benchmarks/exactness.md. `--quick` leaves
out the two ranks, and writes nothing: half a table must not stand in the place of a whole one.
"""

import argparse
import json
import platform
from datetime import date
from pathlib import Path

import torch

from benchmarks.table.case import Case
from benchmarks.table.cases import all_cases
from benchmarks.table.collect import Cell, collect, versions
from benchmarks.table.contenders import CONTENDERS, Contender
from benchmarks.table.pages import figure, markdown, parts, remarks, replace_table, to_json
from benchmarks.table.picture import draw

DOCS = Path(__file__).parent.parent / "docs"


class Progress:
    """One line per cell, counted."""

    def __init__(self, total: int) -> None:
        self.total, self.count = total, 0

    def __call__(self, contender: Contender, case: Case, cell: Cell) -> None:
        self.count += 1
        said = f"- ({cell})" if isinstance(cell, str) else "; ".join([figure(cell.error), *remarks(cell)])
        print(f"[{self.count:3}/{self.total}] {contender.title:22} {case.name:38} {said}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one process only; nothing is written")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = [case for case in all_cases() if case.ranks == 1 or not options.quick]
    asked = sum(case.kind in contender.kinds for case in cases for contender in CONTENDERS)
    table = collect(cases, Progress(asked))
    named, day = versions(), date.today().isoformat()
    text = markdown(table, named, day)
    print(f"\n{text}")
    if options.quick:
        return
    content = {"date": day, "versions": {"python": platform.python_version(), **named}, "table": to_json(table)}
    (DOCS / "benchmarks" / "exactness.json").write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    (DOCS / "pictures" / "exactness.svg").write_text(draw(parts(table)[0], named, day))
    page = DOCS / "benchmarks" / "exactness.md"
    page.write_text(replace_table(page.read_text(), text))
    print("\nwritten to docs/benchmarks/exactness.json, docs/pictures/exactness.svg and docs/benchmarks/exactness.md")


if __name__ == "__main__":
    main()

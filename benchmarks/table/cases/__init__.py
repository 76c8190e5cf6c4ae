"""Every case of the table, by family."""

from benchmarks.table.case import Case
from benchmarks.table.cases import coupled, precision, rows, tokens


def all_cases() -> list[Case]:
    """The rows of the table, those of two ranks last."""
    cases = [*rows.cases(), *tokens.cases(), *coupled.cases(), *precision.cases()]
    return sorted(cases, key=lambda case: case.ranks)

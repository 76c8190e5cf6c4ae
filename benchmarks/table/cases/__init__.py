"""Every case of the table, by family."""

from benchmarks.table.case import Case
from benchmarks.table.cases import coupled, fine_tuning, heads, precision, rows, tokens


def all_cases() -> list[Case]:
    """The rows of the table, those of two ranks last."""
    families = (rows, tokens, coupled, precision, heads, fine_tuning)
    cases = [case for family in families for case in family.cases()]
    return sorted(cases, key=lambda case: case.ranks)

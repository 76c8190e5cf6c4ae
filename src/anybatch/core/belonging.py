"""Rows that belong together: pairs, views of one image, the answers to one question."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from anybatch.core.nesting import Batch
from anybatch.errors import SplitError


@dataclass(frozen=True, slots=True)
class Stacked:
    """`parts` blocks of rows, one after the other; row k of each block belongs with row k of all others: [chosen; rejected]."""

    parts: int

    def __post_init__(self) -> None:
        if isinstance(self.parts, bool) or not isinstance(self.parts, int) or self.parts < 1:
            raise SplitError(
                f"Stacked({self.parts!r}): expected a whole number of blocks, such as 2 for [chosen; rejected]."
            )


Groups = int | Stacked | Callable[[Batch], Any]
"""A number of neighbouring rows, blocks, or a function of the batch that returns one number per row."""


def groups_of(groups: Groups, batch: Batch, count: int) -> list[tuple[int, ...]]:
    """The rows of each group, ascending; groups in the order of their first rows.

    >>> groups_of(2, None, 4), groups_of(Stacked(2), None, 4), groups_of(lambda batch: [7, 1, 7], None, 3)
    ([(0, 1), (2, 3)], [(0, 2), (1, 3)], [(0, 2), (1,)])
    """
    found: dict[Any, list[int]] = {}
    for row, key in enumerate(_keys(groups, batch, count)):
        found.setdefault(key, []).append(row)
    return [tuple(rows) for rows in found.values()]


def _keys(groups: Groups, batch: Batch, count: int) -> list[Any]:
    if isinstance(groups, Stacked):
        _check_even(count, groups.parts, f"groups={groups!r}")
        return [row % (count // groups.parts) for row in range(count)]
    if isinstance(groups, bool) or not (isinstance(groups, int) or callable(groups)) or groups == 0:
        raise SplitError(
            f"groups={groups!r}: expected how many neighbouring rows belong together, such as 2, Stacked(2) for [chosen; "
            "rejected], or a function of the batch that returns one number per row."
        )
    if isinstance(groups, int):
        _check_even(count, groups, f"groups={groups}")
        return [row // groups for row in range(count)]
    told = groups(batch)
    keys = list(told.tolist() if hasattr(told, "tolist") else told)
    if len(keys) != count:
        raise SplitError(
            f"groups(batch) gave {len(keys)} numbers for {count} rows; expected one per row, the same for rows that belong "
            "together."
        )
    return keys


def _check_even(count: int, size: int, spelled: str) -> None:
    if size < 1 or count % size:
        raise SplitError(
            f"{spelled}: a batch of {count} rows is no whole number of groups. Give batches of a multiple of {size} rows "
            "(drop_last=True in the loader), or groups=, a function of the batch that returns one number per row."
        )


def why_rows_stay(split: Any, batch: Batch) -> str | None:
    """Why single rows of `batch` cannot be taken out of it, in words; None where they can."""
    if getattr(batch, "whole", False):
        return "its micro-batches must stay whole"
    if getattr(split, "groups", None) is not None:
        return "its rows belong together (groups=)"
    if getattr(split, "batch_dim", None):
        return f"its rows are dim {split.batch_dim} (batch_dim=)"
    return None

"""What one rank finds out for all of them."""

from collections.abc import Callable
from typing import TypeVar

from anybatch.parallel import Ranks

Value = TypeVar("Value")


def from_first_rank(make: Callable[[], Value], ranks: Ranks) -> Value:
    """Every rank gets what `make` returns on rank 0; an error that it raises there is raised on every rank.

    On the other ranks the exception has `is_told` set, because rank 0 alone needs to print it.
    """
    if ranks.size == 1:
        return make()
    raised: list[Exception] = []

    def attempt() -> tuple[Value | None, Exception | None]:
        try:
            return make(), None
        except Exception as error:
            raised.append(error)
            return None, error

    value, told = ranks.lend(attempt, 0)
    if raised:
        raise raised[0]
    if told is not None:
        told.is_told = True  # type: ignore[attr-defined]
        raise told
    return value  # type: ignore[return-value]

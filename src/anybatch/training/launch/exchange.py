"""What one rank finds out for all of them."""

from collections.abc import Callable
from typing import TypeVar

from anybatch.parallel import Ranks

Value = TypeVar("Value")


def from_first_rank(make: Callable[[], Value], ranks: Ranks) -> Value:
    """What `make` returns on rank 0, on every rank; what it raises there is raised on all.

    On the others the exception has `is_told` set: whoever prints errors can leave it to rank 0.
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

"""Who is called after each update that was applied."""

from collections.abc import Callable, Iterable
from typing import Any

from anybatch.core.result import UpdateResult
from anybatch.errors import UpdateError

UpdateCallback = Callable[[UpdateResult], object]
OnUpdate = UpdateCallback | Iterable[UpdateCallback] | None
"""One function of the result, or several in the order in which they are called; None for none. What they return is left."""


def callbacks_of(on_update: OnUpdate) -> tuple[UpdateCallback, ...]:
    """Each of them, checked to be callable.

    >>> callbacks_of(None), callbacks_of(print) == callbacks_of([print])
    ((), True)
    """
    given: tuple[Any, ...]
    if on_update is None:
        given = ()
    elif callable(on_update):
        given = (on_update,)
    else:
        given = tuple(on_update) if isinstance(on_update, Iterable) else (on_update,)
    for each in given:
        if not callable(each):
            raise UpdateError(
                f"on_update={each!r:.80} is a {type(each).__name__}; expected a function of the result, such as "
                "lambda result: run.log(result.scalars()), or a list of such functions."
            )
    return given


def tell(callbacks: Iterable[UpdateCallback], result: UpdateResult) -> UpdateResult:
    """Call each with the result, where the update was applied; the result itself."""
    if result.applied:
        for callback in callbacks:
            callback(result)
    return result

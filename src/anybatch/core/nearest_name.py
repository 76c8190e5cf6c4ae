"""A name that somebody mistyped, and the one that was meant."""

from collections.abc import Iterable


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """The end of a sentence: which of `known` was meant; nothing where none of them is near.

    >>> did_you_mean("Updtae", ["Update", "Window"]), did_you_mean("banana", ["Update"])
    ('; did you mean Update?', '')
    """
    from difflib import get_close_matches  # loaded where somebody erred, and not by `import anybatch`

    names = {name.lower(): name for name in known}
    near = get_close_matches(str(word).lower(), names, n=1)
    return f"; did you mean {names[near[0]]}?" if near else ""


def one_of(value: object, choices: Iterable[str], *, or_none: bool = False) -> str:
    """What was expected instead of `value`.

    >>> one_of("drpo", ("raise", "drop")), one_of(3, ("host", "disk"), or_none=True)
    ('expected one of raise, drop; did you mean drop?', 'expected one of host, disk, or None.')
    """
    known = list(choices)
    text = f"expected one of {', '.join(known)}{', or None' if or_none else ''}"
    return text + (did_you_mean(value, known) or ".")

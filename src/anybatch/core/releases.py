"""Which releases of torch were run, and refusing one that lacks what we use of its wrappers for many ranks."""

import warnings
from inspect import get_annotations
from typing import Any

import torch

from anybatch.errors import ParallelError

NEWEST = (2, 15)
"""The newest release that the tests were run with; see docs/versions.md."""


def warn_of_newer(version: str = torch.__version__) -> None:
    """Say once that a release is newer than all that were run: torch may have changed any of the names in this room.

    >>> warn_of_newer("2.15.1+cpu")
    """
    major, minor = version.split(".")[:2]
    if (int(major), int(minor)) > NEWEST:
        warnings.warn(
            f"torch {version} is newer than {NEWEST[0]}.{NEWEST[1]}, the newest that this anybatch was run with. It uses names "
            "that torch does not promise: run its tests, or anybatch verify, or install a newer anybatch.",
            RuntimeWarning,
            stacklevel=2,
        )


def demand(thing: Any, *names: str, wrapper: str) -> None:
    """Refuse a release of torch in which `thing` has lost one of these names."""
    for name in names:
        if not _has(thing, name):
            raise ParallelError(
                f"torch {torch.__version__} has no {type(thing).__name__}.{name}, and without it anybatch cannot synchronise "
                f"the gradients of {wrapper} once per update. Install torch 2.13 to 2.15, or a newer anybatch."
            )


def _has(thing: Any, name: str) -> bool:
    """True of an attribute that is there, and of one that the class announces and sets later; properties are not called."""
    is_there = hasattr(type(thing), name) or name in getattr(thing, "__dict__", ())
    return is_there or any(name in get_annotations(base) for base in type(thing).__mro__)

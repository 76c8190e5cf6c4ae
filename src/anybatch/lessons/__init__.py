"""What teaches: nine pages to learn from, one update traced, and ways of training compared."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anybatch.lessons.arms import ArmPlan, compare, show_spread
    from anybatch.lessons.pages import (
        learn_page,
        lesson_of_cause,
        lesson_of_error,
        lesson_of_finding,
        read_lesson,
        see,
        write_learn_site,
    )
    from anybatch.lessons.update_trace import trace

__all__ = [
    "ArmPlan",
    "compare",
    "learn_page",
    "lesson_of_cause",
    "lesson_of_error",
    "lesson_of_finding",
    "read_lesson",
    "see",
    "show_spread",
    "trace",
    "write_learn_site",
]
_MODULES = {
    "arms": (
        "ArmPlan",
        "compare",
        "show_spread",
    ),
    "pages": (
        "learn_page",
        "lesson_of_cause",
        "lesson_of_error",
        "lesson_of_finding",
        "read_lesson",
        "see",
        "write_learn_site",
    ),
    "update_trace": ("trace",),
}
"""The names of each module, which is loaded when one of them is first asked for: most of them load torch."""

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        for module, names in _MODULES.items():
            if name in names:
                return getattr(import_module(f"{__name__}.{module}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""What teaches: nine pages to learn from, one update traced, and ways of training compared."""

from typing import TYPE_CHECKING

from anybatch.lazy import lazily

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
else:
    __getattr__ = lazily(__name__)

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

"""Nine pages that teach: their words, their widgets, how they become one file."""

from anybatch.lessons.pages.lesson_content import (
    ORDER,
    Claim,
    Lesson,
    LessonPart,
    all_lessons,
    memory_table,
    read_lesson,
)
from anybatch.lessons.pages.lesson_page import learn_page, write_learn_site
from anybatch.lessons.pages.see_lessons import lesson_of_cause, lesson_of_error, lesson_of_finding, see

__all__ = [
    "Claim",
    "Lesson",
    "LessonPart",
    "ORDER",
    "all_lessons",
    "learn_page",
    "lesson_of_cause",
    "lesson_of_error",
    "lesson_of_finding",
    "memory_table",
    "read_lesson",
    "see",
    "write_learn_site",
]

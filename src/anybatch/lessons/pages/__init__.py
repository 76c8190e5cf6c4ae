"""Nine pages that teach: their words, their widgets, how they become one file."""

from anybatch.lessons.pages.lesson_content import ORDER, Claim, Lesson, Part, all_lessons, memory_table, read_lesson
from anybatch.lessons.pages.lesson_page import learn_page, write_learn_site

__all__ = [
    "Claim",
    "Lesson",
    "ORDER",
    "Part",
    "all_lessons",
    "learn_page",
    "memory_table",
    "read_lesson",
    "write_learn_site",
]

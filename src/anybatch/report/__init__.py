"""Finished results in, one HTML page out."""

from anybatch.report.doctor_page import write_doctor_page, write_self_test_page
from anybatch.report.page import lanes_of, write_page

__all__ = [
    "lanes_of",
    "write_doctor_page",
    "write_page",
    "write_self_test_page",
]

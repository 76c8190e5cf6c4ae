"""Finished results in, one HTML page out."""

from anybatch.report.doctor_page import write_doctor_page
from anybatch.report.page import write_page
from anybatch.report.self_test_page import write_self_test_page
from anybatch.report.trace_lanes import lanes_of

__all__ = [
    "lanes_of",
    "write_doctor_page",
    "write_page",
    "write_self_test_page",
]

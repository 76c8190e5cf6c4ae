"""Finished results in, one HTML page out."""

from anybatch.report.doctor_page import write_doctor_page
from anybatch.report.page import write_page

__all__ = [
    "write_doctor_page",
    "write_page",
]

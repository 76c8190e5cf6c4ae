"""Finished results in, one HTML page out."""

from anybatch.report.page import write_page

__all__ = [
    "write_page",
]

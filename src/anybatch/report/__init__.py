"""Finished results in, one HTML page out."""

from anybatch.report.page import write_page
from anybatch.report.trace_lanes import lanes_of

__all__ = [
    "lanes_of",
    "write_page",
]

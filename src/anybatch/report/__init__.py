"""Finished results in, one HTML page out. Nothing imports this room but the command line; it imports no torch."""

from anybatch.report.page import write_page

__all__ = ["write_page"]

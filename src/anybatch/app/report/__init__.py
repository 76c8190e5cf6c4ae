"""Finished results in, one HTML page out."""

from anybatch.app.report.page import write_page

"""Turn finished results into one HTML page."""

from anybatch.app.report.page import write_page

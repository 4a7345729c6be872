"""A run, or several side by side, as one self-contained HTML page."""

from potstill.report.page import write_report

__all__ = ["write_report"]

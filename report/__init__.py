"""Figures and tables from records.  Never imports torch or cupy."""

from report.as_frame import load

__all__ = ["load"]

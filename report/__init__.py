"""Figures and tables from records.  Never imports torch or cupy."""

from report.trials_table import load

__all__ = ["load"]

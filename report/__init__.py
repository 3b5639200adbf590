"""Figures and tables from records.  Never imports torch or cupy."""

"""tests/report/figures."""

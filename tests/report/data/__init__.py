"""tests/report/data."""

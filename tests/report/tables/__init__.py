"""tests/report/tables."""

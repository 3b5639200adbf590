"""tests/report/draw."""

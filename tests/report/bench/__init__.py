"""tests/report/bench."""

"""tests/harness/runs."""

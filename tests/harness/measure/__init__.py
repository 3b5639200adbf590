"""tests/harness/measure."""

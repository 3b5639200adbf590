"""tests/harness/bench."""

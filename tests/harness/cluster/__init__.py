"""tests/harness/cluster."""

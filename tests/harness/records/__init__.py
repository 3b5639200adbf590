"""tests/harness/records."""

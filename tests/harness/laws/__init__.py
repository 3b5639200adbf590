"""tests/harness/laws."""

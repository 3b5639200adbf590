"""tests/harness/train."""

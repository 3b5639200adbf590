"""tests/harness/docpages."""

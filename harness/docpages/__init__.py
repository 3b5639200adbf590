"""harness/docpages."""

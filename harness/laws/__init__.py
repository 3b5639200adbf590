"""harness/laws."""

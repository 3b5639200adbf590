"""harness/measure."""

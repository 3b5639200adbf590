"""harness/cluster."""

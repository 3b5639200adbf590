"""harness/workloads."""

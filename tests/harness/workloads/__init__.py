"""tests/harness/workloads."""

"""Tests of harness/workloads."""

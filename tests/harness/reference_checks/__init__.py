"""Tests of harness/reference_checks."""

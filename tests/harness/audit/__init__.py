"""Tests of harness/audit."""

"""Tests of harness/runs."""

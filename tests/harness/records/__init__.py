"""Tests of harness/records."""

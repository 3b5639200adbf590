"""Tests of harness/laws."""

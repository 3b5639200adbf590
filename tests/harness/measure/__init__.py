"""Tests of harness/measure."""

"""Tests of harness.lab."""

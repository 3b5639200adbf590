"""Tests of harness.strategies."""

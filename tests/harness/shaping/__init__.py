"""Tests of harness/shaping."""

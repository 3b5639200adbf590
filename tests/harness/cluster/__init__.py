"""Tests of harness/cluster."""

"""Tests of harness/whatif."""

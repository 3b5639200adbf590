"""Tests of harness/witness."""

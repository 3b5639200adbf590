"""Tests of impl/policy."""

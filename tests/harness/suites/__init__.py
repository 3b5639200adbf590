"""Tests of harness/suites."""

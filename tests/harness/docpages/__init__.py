"""Tests of harness/docpages."""

"""Tests mirror the tree; each docstring is the test's claim."""

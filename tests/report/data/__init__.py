"""Tests of report/data."""

"""Tests of report/effects."""

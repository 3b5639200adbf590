"""Tests of report/tables."""

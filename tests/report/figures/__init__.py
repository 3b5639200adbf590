"""Tests of report/figures."""

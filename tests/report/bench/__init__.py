"""Tests of report/bench."""

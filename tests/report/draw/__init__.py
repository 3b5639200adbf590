"""Tests of report/draw."""

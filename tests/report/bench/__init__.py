"""Tests of report/bench_page."""

"""Tests of impl/plan."""

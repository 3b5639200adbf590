"""Tests of impl/comm."""

"""Tests of impl/engine."""

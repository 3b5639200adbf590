"""Tests of impl/checkpoint."""

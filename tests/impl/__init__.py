"""Tests of impl."""

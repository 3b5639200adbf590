"""Tests of impl/transport."""

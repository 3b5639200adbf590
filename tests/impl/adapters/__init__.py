"""Tests of impl/adapters."""

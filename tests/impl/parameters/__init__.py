"""Tests of impl/parameters."""

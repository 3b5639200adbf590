"""Tests of impl/unit."""

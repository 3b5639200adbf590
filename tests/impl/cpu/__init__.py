"""Tests of impl.cpu."""

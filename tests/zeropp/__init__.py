"""Tests of zeropp."""

"""Tests of docs/tables."""

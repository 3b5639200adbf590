"""Tests of docs/audited."""

"""Tests of the answers to suites' questions."""

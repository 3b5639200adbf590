"""Tests of impl/codecs."""

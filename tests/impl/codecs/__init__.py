"""tests/impl/codecs."""

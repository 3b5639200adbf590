"""tests/impl/checkpoint."""

"""tests/impl/comm."""

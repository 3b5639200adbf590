"""tests/impl/engine."""

"""tests/impl/transport."""

"""tests/impl/adapters."""

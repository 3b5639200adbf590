"""tests/impl/parameters."""

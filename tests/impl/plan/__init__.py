"""tests/impl/plan."""

"""tests/impl/unit."""

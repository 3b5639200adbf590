"""impl/unit."""

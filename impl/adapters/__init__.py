"""impl/adapters."""

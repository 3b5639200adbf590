"""impl/engine."""

"""impl/comm."""

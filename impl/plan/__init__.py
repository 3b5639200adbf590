"""impl/plan."""

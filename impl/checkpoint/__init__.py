"""impl/checkpoint."""

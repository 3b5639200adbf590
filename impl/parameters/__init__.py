"""impl/parameters."""

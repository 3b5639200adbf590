"""impl/transport."""

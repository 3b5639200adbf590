"""report/data."""

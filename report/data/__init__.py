"""Loads records as tables, and derives from them the quantities that pages print."""

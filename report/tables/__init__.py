"""Makes the tables of a page."""

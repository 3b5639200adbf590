"""Records as tables: the only readers of results."""

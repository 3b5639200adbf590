"""report/draw."""

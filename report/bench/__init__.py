"""report/bench."""

"""harness/bench."""

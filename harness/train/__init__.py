"""harness/train."""

"""harness/suites."""

"""tests/harness/suites."""

"""A question as data: suites, their trials, and model sizes.  No torch."""

"""Running trials: suites in, records out."""

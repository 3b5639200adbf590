"""Plans the trials of a suite, runs them, and makes a record of each."""

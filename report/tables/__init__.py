"""Makes the tables of a report's page from a suite's records."""

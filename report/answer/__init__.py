"""The answer to a suite's question, in sentences."""

"""The golden file, and the test that holds the code to it."""

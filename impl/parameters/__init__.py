"""Parameters outside of passes: built in slices, gathered whole, read and written by name."""

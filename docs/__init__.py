"""Documents, and the programs that write their tables."""

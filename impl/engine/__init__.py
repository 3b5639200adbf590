"""The training engine: what a loop calls, what hooks do in passes, what the optimizer steps."""

"""The training engine: the methods that a training loop calls, the hooks that run in passes, the masters."""

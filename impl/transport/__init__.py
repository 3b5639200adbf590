"""How bytes move inside a node on a CPU: shared memory, and waiting for it."""

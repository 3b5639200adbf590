"""How bytes move inside a node on a CPU: shared memory, waiting for it, and leases on it."""

"""Provides what the wire sends with: groups of ranks, shared memory, thread ranks, and the side streams of a GPU."""

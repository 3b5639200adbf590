"""Provides what the wire sends with: groups of ranks, shared memory inside a node, and side streams of a GPU."""

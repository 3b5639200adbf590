"""Constructs parameters in shards, and gathers, reads and writes parameters outside of forward and backward passes."""

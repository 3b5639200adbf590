"""Collectives over the groups of a mesh: the wire that counts every byte, and what runs on it."""

"""Runs collectives over the groups of a mesh, all on one wire that counts every byte."""

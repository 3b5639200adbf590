"""Runs collectives between the ranks of a mesh; all messages go through a wire, the class that counts every byte."""

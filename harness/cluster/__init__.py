"""Starts the ranks of a trial on one or several machines, and makes the links between nodes."""

"""Trials and sweeps: from a plan to a record."""

"""Draws tidy tables as figures: marks, axes, and the looks of configurations."""

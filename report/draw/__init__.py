"""Draws tidy tables (one row per observation) as figures: marks, axes, and the looks of configurations."""

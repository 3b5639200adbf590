"""Draws tidy tables (one row per observation) as figures, and gives each configuration a colour and a marker."""

"""Timings, as ratios within one run; nothing here asserts a time."""

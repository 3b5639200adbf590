"""Compares configurations with their baselines: in seconds, bytes, errors and losses, and in net speed-ups."""

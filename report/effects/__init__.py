"""Compares configurations with their baselines: seconds, bytes, errors, losses, and net speed-ups from both."""

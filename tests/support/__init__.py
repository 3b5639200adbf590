"""Shared by tests: ranks as threads or processes, strategies, models, training loops."""

"""Codecs, which turn elements into bytes: their values, their specification in PyTorch, and rounding noise."""

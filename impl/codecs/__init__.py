"""Defines codecs, which turn elements into bytes, specifies them in PyTorch, and defines rounding noise."""

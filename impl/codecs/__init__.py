"""Defines codecs, which encode tensors as bytes for messages, and their reference implementation in PyTorch."""

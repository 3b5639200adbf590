"""Computes from a policy which messages ranks send and when, and predicts bytes, memory and step time.

Pure: no torch.
"""

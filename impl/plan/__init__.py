"""Computes from a policy which messages ranks send and when, and predicts bytes, memory and step time.

A policy says what is sent, held and computed in training.  No module of this package imports torch.
"""

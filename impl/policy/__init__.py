"""Describes what training sends, keeps in memory and computes, and the layout of ranks and of shards.

Pure: no torch.
"""

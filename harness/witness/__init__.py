"""Watches a trial while it trains: independent code computes its batches, optimizer steps and seconds a second time."""

"""Watches a trial while it trains: other code computes batches, optimizer steps and seconds again."""

"""Watches a trial while it trains: batches, optimizer steps and seconds, each found again in a second way."""

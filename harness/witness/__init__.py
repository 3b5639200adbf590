"""Checks a trial while it trains: independent code recomputes its batches and optimizer steps, and times it again."""

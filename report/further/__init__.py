"""Writes the sentences that follow the first sentence in the head of a page; each module is on one subject."""

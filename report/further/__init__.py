"""Writes the sentences after the first sentence in the head of a page; each module of this package has one subject."""

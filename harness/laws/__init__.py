"""``zeropp check``: tests the laws that codecs declare, on rows that are likely to break them."""

from typing import Final

# Elements of the longest row, on which every claim except UNBIASED is tried once.  Indices of 16 bits overflow on it.
ELEMENTS: Final = 70_001

"""``zeropp check``: the laws of codecs, and the inputs that attack them."""

from typing import Final

ELEMENTS: Final = 70_001  # of the longest row, which every claim but UNBIASED meets once: beyond 16 bits

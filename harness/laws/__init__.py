"""``zeropp check``: tests the laws that codecs and users' methods declare, on inputs that are likely to break them."""

from typing import Final

# Elements of the longest row.  Every claim except UNBIASED is tried on a row of this length, in which 16-bit indices
# overflow.
ELEMENTS: Final = 70_001

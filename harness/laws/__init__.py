"""``zeropp check``: the laws of codecs, and the inputs that attack them."""

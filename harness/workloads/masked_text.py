"""Masks tokens as BERT does (arXiv 1810.04805, section 3.1).  No torch.

15 % of each sequence's tokens become targets.  Of these, 80 % are replaced with the mask, 10 % with a random
token, and 10 % stay as they are.
"""

from __future__ import annotations

import hashlib
from typing import Final

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]

SHARE: Final = 0.15  # share of a sequence's tokens that are predicted; the same number in each sequence
NO_TARGET: Final = -100  # target of all other tokens, which torch's cross-entropy ignores
# A random byte decides what a predicted token is replaced with.
_SHOWN_AS_MASK: Final = 205  # bytes below this value, eight in ten, choose the mask
_SHOWN_AT_RANDOM: Final = 231  # bytes from 205 to 230, one in ten, choose a random token; others, no change


def mask(text: Tokens, keys: list[str], vocab: int) -> tuple[Tokens, Tokens]:
    """Return (B, T) int64 masked tokens, and (B, T) int64 targets, ``NO_TARGET`` where nothing is predicted.

    Args:
        text: (B, T) int64 tokens from 0 to ``vocab - 1``.
        keys: A key for each of the B sequences, whose hash decides everything that is random.
        vocab: Size of the vocabulary; this number is also the token that stands for the mask.
    """
    length = text.shape[1]
    shown, targets = text.copy(), np.full_like(text, NO_TARGET)
    for row, key in enumerate(keys):
        bits = hashlib.shake_128(f"{key}/mask".encode()).digest(10 * length)
        order = np.frombuffer(bits, dtype="<u8", count=length).argsort(kind="stable")
        places = order[: max(1, round(SHARE * length))]
        fate, replacement = np.frombuffer(bits, dtype=np.uint8, offset=8 * length).reshape(2, length)
        targets[row, places] = text[row, places]
        random = places[fate[places] < _SHOWN_AT_RANDOM]
        shown[row, random] = replacement[random].astype(np.int64) % vocab
        shown[row, places[fate[places] < _SHOWN_AS_MASK]] = vocab
    return shown, targets

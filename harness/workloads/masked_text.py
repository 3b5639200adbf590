"""Masks tokens as BERT does (arXiv 1810.04805, section 3.1).  Does not import torch.

15 % of each sequence's tokens are to be predicted.  Of these tokens, 80 % are replaced with the mask, 10 % with a
random token, and 10 % stay as they are.
"""

from __future__ import annotations

import hashlib
from typing import Final

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]

SHARE: Final = 0.15  # share of the tokens of each sequence that are predicted
NO_TARGET: Final = -100  # target of tokens that are not predicted; torch's cross-entropy ignores it
# A random byte decides what a predicted token is replaced with: below 205 (probability 0.8) with the mask, from 205 to
# 230 (probability 0.1) with a random token.  If the byte is 231 or more (probability 0.1), the token stays as it is.
_SHOWN_AS_MASK: Final = 205
_SHOWN_AT_RANDOM: Final = 231


def mask(text: Tokens, keys: list[str], vocab: int) -> tuple[Tokens, Tokens]:
    """Mask tokens, and return what the model reads and what it is to predict.

    Args:
        text: (B, T) int64 tokens from 0 to ``vocab - 1``.
        keys: A text for each of the B sequences.  Its hash determines everything that is random in the sequence.
        vocab: Size of the vocabulary.  The token with this number is the mask.

    Returns:
        The tokens that the model reads, (B, T) int64, and the targets, (B, T) int64.  A target is the original token.
        If the token is not predicted, its target is ``NO_TARGET``.
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

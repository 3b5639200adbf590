"""BERT's masking of tokens (arXiv 1810.04805, section 3.1), equally many in each sequence.  No torch."""

from __future__ import annotations

import hashlib
from typing import Final

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]

SHARE: Final = 0.15
NO_TARGET: Final = -100  # ignored by torch's cross-entropy
_SHOWN_AS_MASK: Final = 205  # of 256: eight in ten
_SHOWN_AT_RANDOM: Final = 231  # up to here, of 256: one in ten


def mask(text: Tokens, keys: list[str], vocab: int) -> tuple[Tokens, Tokens]:
    """(B, T) int64 masked tokens, and targets or ``NO_TARGET``, by the B ``keys``; ``vocab`` is the mask."""
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

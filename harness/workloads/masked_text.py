"""Masked text: which bytes of a sequence a model has to fill in.  No torch.

As BERT does (arXiv 1810.04805, section 3.1): 15 % of the places are targets; of these eight in ten show
the mask, one in ten a byte at random, one in ten what was there.  Each sequence has the same number of
targets, so a mean over sequences weighs all alike.
"""

from __future__ import annotations

import hashlib
from typing import Final

import numpy as np

from harness.workloads.corpus import Tokens

SHARE: Final = 0.15
NO_TARGET: Final = -100  # what torch's cross-entropy leaves out
_SHOWN_AS_MASK: Final = 205  # of 256: eight in ten
_SHOWN_AT_RANDOM: Final = 231  # up to here, of 256: one in ten


def targets_in(length: int) -> int:
    """How many of ``length`` places are to be filled in; at least one."""
    return max(1, round(SHARE * length))


def masked(text: Tokens, keys: list[str], vocab: int) -> tuple[Tokens, Tokens]:
    """Hide some tokens of each sequence, as its key says.

    Args:
        text: (B, T) int64 below ``vocab``.
        keys: of the B sequences; what is hidden follows from them alone.
        vocab: the token that stands for the mask.

    Returns:
        (B, T) int64 tokens as they are shown, and (B, T) int64 targets: what was there, or
        :data:`NO_TARGET`.
    """
    length = text.shape[1]
    shown, targets = text.copy(), np.full_like(text, NO_TARGET)
    for row, key in enumerate(keys):
        bits = hashlib.shake_128(f"{key}/mask".encode()).digest(10 * length)
        order = np.frombuffer(bits, dtype="<u8", count=length).argsort(kind="stable")
        places = order[: targets_in(length)]
        fate, replacement = np.frombuffer(bits, dtype=np.uint8, offset=8 * length).reshape(2, length)
        targets[row, places] = text[row, places]
        for place in places:
            if fate[place] < _SHOWN_AS_MASK:
                shown[row, place] = vocab
            elif fate[place] < _SHOWN_AT_RANDOM:
                shown[row, place] = int(replacement[place]) % vocab
    return shown, targets

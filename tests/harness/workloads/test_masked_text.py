"""Which bytes are to be filled in."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from harness.workloads.masked_text import NO_TARGET, mask

MASK = 256


def text(rows: int, length: int) -> np.ndarray:
    return np.arange(rows * length, dtype=np.int64).reshape(rows, length) * 7 % MASK


@given(st.integers(1, 4), st.integers(1, 300), st.integers(0, 2**32))
def test_every_sequence_has_as_many_targets(rows: int, length: int, salt: int) -> None:
    """Targets are the original bytes at 15 % of each sequence's places; other places show their byte."""
    whole = text(rows, length)
    shown, targets = mask(whole, [f"{salt}/{row}" for row in range(rows)], MASK)
    hidden = targets != NO_TARGET
    assert (hidden.sum(1) == max(1, round(0.15 * length))).all()
    assert (targets[hidden] == whole[hidden]).all()
    assert (shown[~hidden] == whole[~hidden]).all()
    assert ((shown >= 0) & (shown <= MASK)).all()


def test_shares() -> None:
    """Of many targets eight in ten show the mask, one in ten another byte, one in ten the byte itself."""
    whole = text(200, 400)
    shown, targets = mask(whole, [str(row) for row in range(200)], MASK)
    hidden = targets != NO_TARGET
    masks, kept = (shown[hidden] == MASK).mean(), (shown[hidden] == whole[hidden]).mean()
    assert abs(masks - 0.8) < 0.02
    assert abs(kept - 0.1) < 0.02


def test_masks_are_pinned() -> None:
    """A key hides the same places on every machine and with every version of numpy."""
    _, targets = mask(text(1, 40), ["0/0/0/0/0"], MASK)
    assert np.flatnonzero(targets[0] != NO_TARGET).tolist() == [1, 6, 11, 29, 31, 36]

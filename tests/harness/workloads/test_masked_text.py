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
    """Targets are what stood there, 15 % of each sequence's places; other places show what stands there."""
    given_text = text(rows, length)
    shown, targets = mask(given_text, [f"{salt}/{row}" for row in range(rows)], MASK)
    asked = targets != NO_TARGET
    assert (asked.sum(1) == max(1, round(0.15 * length))).all()
    assert (targets[asked] == given_text[asked]).all()
    assert (shown[~asked] == given_text[~asked]).all()
    assert ((shown >= 0) & (shown <= MASK)).all()


def test_shares() -> None:
    """Of many targets eight in ten show the mask, one in ten another byte, one in ten the byte itself."""
    given_text = text(200, 400)
    shown, targets = mask(given_text, [str(row) for row in range(200)], MASK)
    asked = targets != NO_TARGET
    masks, kept = (shown[asked] == MASK).mean(), (shown[asked] == given_text[asked]).mean()
    assert abs(masks - 0.8) < 0.02
    assert abs(kept - 0.1) < 0.02


def test_masks_are_pinned() -> None:
    """A key hides the same places on every machine and with every version of numpy."""
    _, targets = mask(text(1, 40), ["0/0/0/0/0"], MASK)
    assert np.flatnonzero(targets[0] != NO_TARGET).tolist() == [1, 6, 11, 29, 31, 36]

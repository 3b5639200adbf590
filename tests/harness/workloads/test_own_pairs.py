"""Batches of a user's own pairs of arrays are drawn by their key, in the types that a model gets."""

from __future__ import annotations

import numpy as np
import pytest

from harness.workloads.own_pairs import OwnPairs, are_pairs


def pairs(kind: str = "f8", answer: str = "i4") -> OwnPairs:
    read = np.arange(40 * 6).reshape(40, 2, 3).astype(kind)
    targets = np.arange(40).astype(answer)
    return OwnPairs("own", ((read[:30], targets[:30]), (read[30:], targets[30:])))


def test_an_input_comes_with_its_own_target() -> None:
    """In training and in validation, whatever the order in which they are drawn."""
    dataset = pairs()
    drawn = dataset.batch(seed=1, step=2, micro_batch=0, rank=3, sequences=8)
    again = dataset.batch(seed=1, step=2, micro_batch=0, rank=3, sequences=8)
    dealt = dataset.validation_batches(batches=2, rank=0, world=1, sequences=5)
    for read, answer in (drawn, *dealt):
        assert (read[:, 0, 0] == 6 * answer).all()
    assert (drawn[1] == again[1]).all()
    assert drawn[1].max() < 30
    assert sorted(np.concatenate([answer for _, answer in dealt])) == list(range(30, 40))


@pytest.mark.parametrize("kind", ["f2", "f4", "f8", "i1", "u1", "u2", "i8", "?"])
def test_types_are_those_of_a_model(kind: str) -> None:
    """Floating numbers are float32, all others int64; the bytes of an example are those of these types."""
    dataset = pairs(kind, "u2")
    read, answer = dataset.batch(seed=0, step=0, micro_batch=0, rank=0, sequences=4)
    assert read.dtype == (np.float32 if kind[0] == "f" else np.int64)
    assert answer.dtype == np.int64
    assert dataset.example_bytes == (read.nbytes + answer.nbytes) // 4


def test_every_array_is_in_the_digest() -> None:
    """Its type, its shape and its entries."""
    parts = [[np.zeros((4, 2)), np.zeros(4)], [np.zeros((2, 2)), np.zeros(2)]]
    digests = {OwnPairs("own", parts).sha256}
    for place in range(4):
        changed = [[array.copy() for array in part] for part in parts]
        changed[place // 2][place % 2].flat[-1] = 1
        digests.add(OwnPairs("own", changed).sha256)
    digests.add(OwnPairs("own", [[a.astype("f4") for a in part] for part in parts]).sha256)
    digests.add(OwnPairs("own", [[a.reshape(len(a), -1, 1) for a in part] for part in parts]).sha256)
    assert len(digests) == 7


def test_rows_of_tokens_are_no_pairs() -> None:
    """Arrays and lists of numbers are tokens; lists of arrays are pairs, as many as they may be."""
    assert not are_pairs((np.arange(3), np.arange(2)))
    assert not are_pairs(([1, 2], [3, 4]))
    assert are_pairs(([np.arange(3), np.arange(3)], [np.arange(2), np.arange(2)]))
    assert are_pairs((([[1, 2], [3]], [0, 1]), ([[1]], [0])))

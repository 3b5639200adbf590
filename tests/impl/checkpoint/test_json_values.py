"""What is no tensor goes through JSON without loss, or is refused."""

from __future__ import annotations

import json
from enum import IntEnum
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from impl.checkpoint.commit import CheckpointError
from impl.checkpoint.json_values import from_json, to_json

NUMBERS = st.sampled_from([torch.tensor(0.1), torch.tensor(1 << 40), torch.tensor(2.0, dtype=torch.bfloat16)])
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), NUMBERS)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(), inner, max_size=3),
    ),
    max_leaves=8,
)


@given(VALUES)
def test_values_come_back_through_text(value: Any) -> None:
    """Types too: tuples stay tuples, numbers in tensors keep their types, floats their bits, NaN is NaN."""
    assert repr(from_json(json.loads(json.dumps(to_json(value, "value"))))) == repr(value)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": [1, {2}]}, r"extra\['a'\]\[1\]: set cannot be written"),
        ({1: 2}, "extra: key 1 cannot be written"),
        ({"__tuple__": []}, "extra: key '__tuple__' cannot"),
        ({"__number__": ["F32", 1.0]}, "extra: key '__number__' cannot"),
        (b"", "extra: bytes cannot"),
        ([torch.ones(1)], r"extra\[0\]: Tensor cannot"),
        ({"m": IntEnum("M", ["A"])["A"]}, r"extra\['m'\]: M cannot"),
        ([type("Real", (float,), {})(1.0)], r"extra\[0\]: Real cannot"),
    ],
)
def test_what_has_no_json_is_refused_by_its_place(value: Any, words: str) -> None:
    """Nothing is pickled, guessed or left out."""
    with pytest.raises(CheckpointError, match=words):
        to_json(value, "extra")

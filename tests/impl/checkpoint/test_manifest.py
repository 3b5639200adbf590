"""A manifest passes through JSON without loss, or is refused in one line."""

from __future__ import annotations

import json
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from impl.checkpoint.commit import MANIFEST, CheckpointError, begin, commit
from impl.checkpoint.json_values import from_json, to_json
from impl.checkpoint.manifest import read_manifest
from tests.impl.checkpoint.checkpointed import EMPTY

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
    ("value", "message"),
    [
        ({"a": [1, {2}]}, r"extra\['a'\]\[1\]: set cannot be written"),
        ({1: 2}, "extra: key 1 cannot be written"),
        ({"__tuple__": []}, "extra: key '__tuple__' cannot"),
        ([torch.ones(1)], r"extra\[0\]: Tensor cannot"),
        ({"m": IntEnum("M", ["A"])["A"]}, r"extra\['m'\]: M cannot"),
        ([type("Real", (float,), {})(1.0)], r"extra\[0\]: Real cannot"),
    ],
)
def test_what_has_no_json_is_refused_by_its_place(value: Any, message: str) -> None:
    """Nothing is pickled, guessed or left out."""
    with pytest.raises(CheckpointError, match=message):
        to_json(value, "extra")


def test_a_manifest_comes_back(tmp_path: Path) -> None:
    """With all its fields."""
    assert read_manifest(commit(begin(tmp_path), EMPTY.text())) == EMPTY


FIELDS = json.loads(EMPTY.text())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 200_000, "cut short, or not JSON"),
        (EMPTY.text()[:-9], "cut short, or not JSON"),
        ('{"format": "pt"}', "not a manifest of a zeropp checkpoint"),
        ("[]", "not a manifest of a zeropp checkpoint"),
        (json.dumps({**FIELDS, "version": 1}), "version 1 of the format; this program reads version 2"),
        (json.dumps({**FIELDS, "step": 7}), "altered since it was written"),
        (json.dumps({**FIELDS, "extra": float("nan")}), "altered since it was written"),
    ],
)
def test_what_is_no_manifest_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    """Nested too deeply, cut short, foreign, of another version, altered."""
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(CheckpointError, match=rf"^{tmp_path}/manifest.json: .*{message}.*$"):
        read_manifest(tmp_path)

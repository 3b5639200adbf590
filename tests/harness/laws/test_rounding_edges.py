"""Rows at the edges between a codec's levels hold all of them, by the reference's own codes, at many scales.

That they tell a tie from what is beside it, and a product from a quotient, is tested in ``test_laws.py``.
"""

from __future__ import annotations

import pytest
import torch

from harness.laws.adversarial_rows import LONGEST
from harness.laws.rounding_edges import edge_rows, levels, spans
from impl.codecs.codec import Blocked, FloatCodec, Raw, parse
from impl.codecs.reference import DTYPES
from impl.codecs.rounding_noise import Noise
from tests.impl.codecs.test_reference import through

INTEGERS = [f"int{bits}:shard{option}" for bits in range(2, 9) for option in ("", ":asym")]
FLOATS = ["fp8e4m3:shard", "fp8e5m2:shard", "mxfp8", "mxfp8e5m2", "mxfp4"]


def blocked(text: str) -> Blocked:
    codec = parse(text)
    assert not isinstance(codec, Raw)
    return codec


@pytest.mark.parametrize("text", [*INTEGERS, *FLOATS])
def test_levels_are_what_codes_decode_to(text: str) -> None:
    """At scale 1 numbers of the whole range decode to levels alone, and every level to itself."""
    codec, own = blocked(text), levels(blocked(text)).float()
    if isinstance(codec, FloatCodec) and codec.element != "e2m1":
        codec = FloatCodec(codec.element, "shard")
    assert own.tolist() == sorted(set(own.tolist()))
    low = 0.0 if codec.asymmetric else -codec.largest
    ends = torch.tensor([low, codec.largest])
    dense = torch.cat([torch.linspace(low, codec.largest, 3000), own])
    found = set(torch.cat([through(codec, torch.cat([ends, part])) for part in dense.split(30)]).tolist())
    assert found == {*own.tolist()}


@pytest.mark.parametrize("text", [*INTEGERS, *FLOATS])
def test_rows_are_whole_and_short(text: str) -> None:
    """Rows of every type are finite, below LONGEST, of several scales, and a block of them has its scale."""
    codec = blocked(text)
    for kind in ("fp32", "bf16", "fp16"):
        rows = list(edge_rows(codec, kind, Noise((1, 2, 3, 4))))
        assert len(rows) == len(spans(codec, kind)) >= 3
        for row in rows:
            assert row.isfinite().all()
            assert row.dtype == DTYPES[kind]
            assert len(row) <= LONGEST
    assert {1.0, 2.0**-126} <= {span.scale for span in spans(codec, "fp32")}

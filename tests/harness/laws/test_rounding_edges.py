"""Rows at the edges between a codec's levels are where they claim to be, by the reference's own codes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from harness.laws.adversarial_rows import LONGEST
from harness.laws.rounding_edges import edge_rows, levels, spans
from impl.codecs import reference
from impl.codecs.codec import Blocked, Dtype, FloatCodec, Raw, parse
from impl.codecs.reference import DTYPES
from impl.codecs.rounding_noise import Noise

NOISE = Noise((1, 2, 3, 4))
INTEGERS = [f"int{bits}:shard{option}" for bits in range(2, 9) for option in ("", ":asym")]
FLOATS = ["fp8e4m3:shard", "fp8e5m2:shard", "mxfp8", "mxfp8e5m2", "mxfp4"]


def blocked(text: str) -> Blocked:
    """A codec with scales."""
    codec = parse(text)
    assert not isinstance(codec, Raw)
    return codec


def decoded(codec: Blocked, x: Tensor) -> Tensor:
    """What ``x`` (S,) becomes, in fp32."""
    frame, out = torch.empty(codec.frame_bytes(len(x)), dtype=torch.uint8), torch.empty(len(x))
    reference.encode(codec, x, frame, noise=NOISE if codec.stochastic else None)
    reference.decode(codec, frame, out)
    return out


@pytest.mark.parametrize("text", [*INTEGERS, *FLOATS])
def test_levels_are_what_codes_decode_to(text: str) -> None:
    """At scale 1 every level decodes to itself, and numbers in between to no other."""
    codec = blocked(text)
    if isinstance(codec, FloatCodec):
        codec = FloatCodec(codec.element, "shard") if codec.element != "e2m1" else codec
    own = levels(codec).float()
    assert own.tolist() == sorted(set(own.tolist()))
    period = 32 if codec.block == 32 else len(own)
    for part in own.split(period - 2):
        row = torch.cat([own[:1], own[-1:], part])
        assert torch.equal(decoded(codec, row), row)
    between = torch.linspace(float(own[0]), float(own[-1]), 3001)
    row = torch.cat([between, own[-1:].expand(-len(between) % 32 + 32)])
    wide = replace(codec, block="shard") if not isinstance(codec, FloatCodec) else codec
    if codec.block != 32:
        assert set(decoded(wide, row).tolist()) <= set(own.tolist())


@pytest.mark.parametrize("kind", ["fp32", "fp16"])
@pytest.mark.parametrize("text", INTEGERS)
def test_a_triple_stands_around_every_tie(text: str, kind: Dtype) -> None:
    """At scale 1 the number below a tie has one code, that above the next, and the tie one of the two."""
    codec = blocked(text)
    row = next(edge_rows(codec, kind, NOISE))
    period = 3 if text.endswith("asym") else 2
    steps = decoded(codec, row)[period - 1 :: period].view(-1, 3)
    own = levels(codec)
    wide = {16: torch.int16, 32: torch.int32}[torch.finfo(DTYPES[kind]).bits]
    triples = row[period - 1 :: period].view(-1, 3)
    assert (triples[:, 1:].contiguous().view(wide) - triples[:, :2].contiguous().view(wide) == 1).all()
    assert torch.equal(triples[:, 1].double(), (own[1:] + own[:-1]) / 2)
    assert steps.amin(dim=1).tolist() == own[:-1].tolist()
    assert steps.amax(dim=1).tolist() == own[1:].tolist()
    assert not any(middle % 2 for middle in steps[:, 1].tolist())


@pytest.mark.parametrize(
    ("text", "share"),
    [("int2:shard", 0.4), ("int4:shard", 0.9), ("int8:shard", 0.98), ("fp8e4m3:shard", 0.98)],
)
def test_random_bits_move_the_ties(text: str, share: float) -> None:
    """Each stands where its element's random bits turn the rounding: around nearly all, codes are one apart.

    Not around all: a quotient below a half has bits that its sum with the random ones has not, so the number
    beside a tie becomes the tie; of two bits half of them are such.
    """
    codec = replace(blocked(text), stochastic=True)
    triples = decoded(codec, next(edge_rows(codec, "fp32", NOISE)))[1::2].view(-1, 3)
    own = levels(codec).float()
    apart = torch.searchsorted(own, triples.amax(dim=1)) - torch.searchsorted(own, triples.amin(dim=1))
    assert len(triples) >= 20
    assert apart.max() == 1
    assert (apart == 1).float().mean() > share


@pytest.mark.parametrize("text", [*INTEGERS, *FLOATS])
def test_rows_are_whole_and_short(text: str) -> None:
    """Rows of every type are finite, below LONGEST, of several scales, and a block of them has its scale."""
    codec = blocked(text)
    for kind in ("fp32", "bf16", "fp16"):
        rows = list(edge_rows(codec, kind, NOISE))
        assert len(rows) == len(spans(codec, kind)) >= 3
        for row in rows:
            assert row.isfinite().all()
            assert row.dtype == DTYPES[kind]
            assert len(row) <= LONGEST
    scales = [span.scale for span in spans(codec, "fp32")]
    assert 1.0 in scales
    assert 2.0**-126 in scales

"""Codecs as values: text forms, sizes, refusals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from impl.codec import Codec, CodecError, IntCodec, common_grain, parse
from tests.strategies import codecs


@given(codecs)
def test_text_form_reads_back(codec: Codec) -> None:
    """Reading a codec's text form gives the codec."""
    assert parse(str(codec)) == codec


@given(codecs, st.integers(0, 5000))
def test_frames_hold_codes_and_scales_and_nothing_else(codec: Codec, numel: int) -> None:
    """A frame is its codes and scales, each padded to 16 bytes, and grows with the elements."""
    size = codec.frame_bytes(numel)
    scales = 4 * codec.blocks(numel) * (2 if getattr(codec, "asymmetric", False) else 1)
    assert size % 16 == 0
    assert 0 <= size - codec.code_bytes(numel) - scales < 32
    assert codec.frame_bytes(numel + 1) >= size


@pytest.mark.parametrize(
    ("text", "bits_per_element"),
    [("int8:2048", 8.015625), ("int4:256", 4.125), ("int4:64", 4.5), ("int4:64:asym", 5.0), ("bf16", 16)],
)
def test_bytes_equal_the_published_ratio(text: str, bits_per_element: float) -> None:
    """Scale overhead is that of facts A2: b + 32/B bits per element, twice the scales if asymmetric."""
    numel = 1 << 20
    assert parse(text).frame_bytes(numel) * 8 / numel == bits_per_element


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("int9:64", "2 to 8 bits"),
        ("int1:64", "2 to 8 bits"),
        ("int8:0", "at least 1"),
        ("int8", "expected fp32, bf16, fp16, int"),
        ("int8:x", "not a number"),
        ("int8:64:round", "unknown option 'round'"),
        ("bf16:3", "takes no options"),
        ("float", "expected"),
        ("", "expected"),
        ("int8:-4", "not a number"),
    ],
)
def test_impossible_codecs_are_refused_by_name(text: str, words: str) -> None:
    """A text that is no codec raises one line that says what is allowed."""
    with pytest.raises(CodecError, match=words):
        parse(text)


def test_grain_suits_all_codecs() -> None:
    """The common grain is a multiple of every block and of a 16-byte vector of 4-bit codes."""
    assert common_grain(parse("int8:2048"), parse("int4:96"), parse("bf16")) == 6144
    assert common_grain(IntCodec(4, "shard")) == 32

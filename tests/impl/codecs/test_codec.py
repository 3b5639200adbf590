"""Codecs are values: their text forms, sizes, promises and refusals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from impl.codecs.codec import Codec, CodecError, FloatCodec, IntCodec, common_grain, parse
from tests.support.strategies import codecs, stochastic_codecs

every_codec = st.one_of(codecs, stochastic_codecs)


@given(every_codec)
def test_text_form_reads_back(codec: Codec) -> None:
    """Parsing a codec's text form gives the codec."""
    assert parse(str(codec)) == codec


@given(every_codec, st.integers(0, 5000))
def test_frames_hold_codes_and_scales_and_nothing_else(codec: Codec, numel: int) -> None:
    """A frame has codes, and scales of 4 bytes or 1, with offsets if asymmetric; each part is padded to 16 bytes."""
    size = codec.frame_bytes(numel)
    assert size % 16 == 0
    assert 0 <= size - codec.code_bytes(numel) - codec.scale_bytes(numel) < 32
    assert codec.frame_bytes(numel + 1) >= size
    width = 1 if isinstance(codec, FloatCodec) and codec.scale == "e8m0" else 4
    offsets = isinstance(codec, IntCodec) and codec.asymmetric
    assert codec.scale_bytes(numel) == codec.blocks(numel) * width * (2 if offsets else 1)


@pytest.mark.parametrize(
    ("text", "bits_per_element"),
    [
        ("int8:2048", 8.015625),
        ("int4:256", 4.125),
        ("int4:64", 4.5),
        ("int4:64:asym", 5.0),
        ("int4:64:hadamard32:stochastic", 4.5),
        ("fp8e4m3:128", 8.25),
        ("mxfp8", 8.25),
        ("mxfp4", 4.25),
        ("bf16", 16),
    ],
)
def test_bytes_equal_the_published_ratio(text: str, bits_per_element: float) -> None:
    """The overhead is 32 / block bits (facts A2), twice that with offsets, and 8 / 32 bits for MX."""
    numel = 1 << 20
    assert parse(text).frame_bytes(numel) * 8 / numel == bits_per_element


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int9:64", "2 to 8 bits"),
        ("int8:0", "a block must have 1 to 2147483647 elements"),
        ("int4:99999999999999999999", "int4:99999999999999999999: a block must have 1 to 2147483647 el"),
        ("int8", "expected fp32, bf16 or fp16; or int"),
        ("int8:64:round", "expected fp32, bf16"),
        ("", "expected"),
        ("int4:64:clip:asym", "expected fp32, bf16"),
        (
            "int4:64:clip:stochastic",
            "clip needs symmetric codes that are rounded to nearest: remove clip or stoch",
        ),
        ("fp8e4m3:64:clip", "expected fp32, bf16"),
        ("fp8e4m3", "expected"),
        ("fp8e4m3:64:asym", "expected fp32, bf16"),
        ("mxfp4:64", "expected fp32, bf16"),
        ("mxfp4:hadamard64", "mxfp4:32: the block must be a multiple of hadamard64"),
        ("int4:64:hadamard24", "not a power of two from 2 to 256"),
        ("int4:64:hadamard0", "expected fp32, bf16"),
        ("int4:48:hadamard32", "the block must be a multiple of hadamard32"),
        ("int4:64:stochastic:hadamard32", "expected fp32, bf16"),
    ],
)
def test_impossible_codecs_are_refused_by_name(text: str, message: str) -> None:
    """A text that is no codec is refused in one line with the allowed forms."""
    with pytest.raises(CodecError, match=message):
        parse(text)


def test_impossible_elements_are_refused_by_name() -> None:
    """Values that no text form has are refused too."""
    for other in (5, None, ["int8:64"], b"int8:64"):
        with pytest.raises(CodecError, match=f"is a {type(other).__name__}: expected"):
            parse(other)  # type: ignore[arg-type]
    with pytest.raises(CodecError, match="remove clip or asym"):
        IntCodec(4, 64, asymmetric=True, clipped=True)
    for fields in (("e4m3", 64, "e8m0"), ("e2m1", 32, "fp32"), ("e3m4", 32, "fp32")):
        message = (
            "no codec {0} with a scale in {2} for {1} elements: use fp8e4m3, .*, where MX formats have blocks"
        )
        with pytest.raises(CodecError, match=message.format(*fields)):
            FloatCodec(*fields)  # type: ignore[arg-type]


def test_grain_suits_all_codecs() -> None:
    """The common grain is a multiple of every block, rotation and 16-byte vector of 4-bit codes."""
    assert common_grain(parse("int8:2048"), parse("int4:96"), parse("bf16")) == 6144
    assert common_grain(IntCodec(4, "shard")) == 32
    assert common_grain(parse("int4:shard:hadamard128"), parse("mxfp4")) == 128

"""Codecs without loss return every bit, and take as many bits as the entropy of the exponents says."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from harness.laws import subject
from harness.laws.adversarial_rows import falsify
from harness.laws.laws import Subject
from impl.codecs import codec as codecs
from impl.codecs.codec import LOSSLESS, CodecError, OwnCodec, parse
from impl.codecs.lossless import HEADER
from impl.codecs.own_rows import used_bytes
from impl.codecs.reference import REFERENCE

ZSTD = pytest.mark.needs("zstandard")
NAMES = [pytest.param(name, marks=ZSTD if "zstd" in name else ()) for name in LOSSLESS]
WHOLE = [pytest.param(name, marks=ZSTD if "zstd" in name else ()) for name in LOSSLESS if "bf16" not in name]
WORDS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def trip(name: str, x: Tensor) -> tuple[Tensor, int]:
    """Encode and decode ``x`` (S,) in memory that held garbage; returns the elements and the bytes used."""
    codec = parse(name)
    frame = torch.full((codec.frame_bytes(x.numel()),), 0xA5, dtype=torch.uint8)
    out = torch.full_like(x, 7.0)
    REFERENCE.encode(codec, x, frame)
    REFERENCE.decode(codec, frame, out)
    return out, used_bytes(codec, frame)


def of_bits(bits: list[int], kind: torch.dtype) -> Tensor:
    """Return the elements whose bits are the low bits of ``bits``."""
    size = 8 * WORDS[kind].itemsize
    words = [
        (word % 2**size + 2 ** (size - 1)) % 2**size - 2 ** (size - 1) for word in bits
    ]  # as signed words
    return torch.tensor(words, dtype=WORDS[kind]).view(kind)


SPECIAL = [
    *(0x7FC00001, 0xFF800003, 0x7F810000, 0x7F800000, 0xFF800000, 0x80000000, 0x00000001, 0x807FFFFF, 0),
    *(0x7FC1, 0xFF83, 0x7F81, 0x7F80, 0xFF80, 0x8000, 0x0001, 0x807F, 0x7C00, 0xFC01),
]
"""Words of 32 and of 16 bits: NaN with payloads, infinities, -0.0, denormals."""


@pytest.mark.parametrize("kind", WORDS, ids=str)
@pytest.mark.parametrize("name", WHOLE)
@given(
    st.lists(st.one_of(st.sampled_from(SPECIAL), st.integers(0, 2**32 - 1)), max_size=60), st.integers(1, 40)
)
@example([], 1)
@example(SPECIAL, 1)
@example([0x80000000], 1000)
def test_every_bit_returns(name: str, kind: torch.dtype, bits: list[int], times: int) -> None:
    """Elements of any bits, NaN payloads and -0.0 among them, return as they were, and fit into the frame."""
    x = of_bits(bits * times, kind)
    if not x.numel():
        frame = torch.zeros(HEADER, dtype=torch.uint8)
        definition = OwnCodec(name).definition
        definition.encode(x, frame)
        definition.decode(frame, x)
        assert definition.used_bytes is not None
        assert definition.used_bytes(frame) == HEADER
        return
    out, used = trip(name, x)
    assert torch.equal(out.view(WORDS[kind]), x.view(WORDS[kind]))
    assert used <= HEADER + x.nbytes


@pytest.mark.parametrize("name", NAMES)
@given(st.lists(st.sampled_from(SPECIAL), max_size=20), st.integers(0, 2**32 - 1))
def test_a_cast_to_bf16_is_all_that_is_lost(name: str, bits: list[int], seed: int) -> None:
    """Elements in bf16 return with every bit; those in fp32 as torch casts them to bf16, if the codec casts."""
    normal = torch.randn(500, generator=torch.Generator().manual_seed(seed)).bfloat16()
    x = torch.cat([of_bits(bits, torch.bfloat16), normal])
    assert torch.equal(trip(name, x)[0].view(torch.int16), x.view(torch.int16))
    if name.endswith("bf16"):
        whole = torch.randn(500, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(trip(name, whole)[0], whole.bfloat16().float())


def bits_of_a_normal_exponent() -> float:
    """Return the entropy of the exponent of a standard normal number, from its distribution function."""
    shares = [
        math.erf(2.0 ** (e + 1) / math.sqrt(2)) - math.erf(2.0**e / math.sqrt(2)) for e in range(-60, 4)
    ]
    return -sum(share * math.log2(share) for share in shares if share)


@pytest.mark.parametrize("name", NAMES)
def test_normal_numbers_take_the_entropy_of_their_exponents(name: str) -> None:
    """A normal number in bf16 takes 8 bits and the entropy of its exponent, within 3 %; in fp32, 16 bits more."""
    x = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0))
    entropy = bits_of_a_normal_exponent()
    assert 2.5 < entropy < 2.6
    for elements, random in ((x.bfloat16(), 8), (x, 8 if name.endswith("bf16") else 24)):
        bits = 8 * trip(name, elements)[1] / x.numel()
        assert random + entropy < bits < 1.03 * (random + entropy)


@pytest.mark.parametrize("name", NAMES)
def test_random_bytes_take_no_more_than_themselves(name: str) -> None:
    """Elements of random bits are stored as they are; zeros take a bit a byte with zlib, and next to none with zstd."""
    words = torch.randint(-(2**15), 2**15, (1 << 14,), generator=torch.Generator().manual_seed(0))
    x = words.to(torch.int16).view(torch.bfloat16)
    assert trip(name, x)[1] == HEADER + x.nbytes
    zeros = torch.zeros(1 << 14)
    assert trip(name, zeros)[1] < HEADER + zeros.nbytes / (7 if "zlib" in name else 100)


@pytest.mark.parametrize("name", NAMES)
def test_promised_laws_hold(name: str) -> None:
    """The codecs keep their laws and duties on adversarial rows, as ``zeropp check codecs`` tries them."""
    checked = subject.read(name)
    assert isinstance(checked, Subject)
    for claim in checked.claims:
        outcome = falsify(checked, claim, examples=10, seed=0, elements=3000)
        assert outcome.violation is None, f"{claim}: {outcome.violation}"


def test_without_zstandard_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package zstandard its codecs are refused when used, and can still be named and read."""
    monkeypatch.setattr(codecs, "has_zstd", lambda: False)
    codec = parse("lossless:zstd:bf16")
    assert str(codec) == "lossless:zstd:bf16"
    with pytest.raises(CodecError) as error:
        codec.frame_bytes(1)
    assert str(error.value) == (
        "lossless:zstd:bf16 needs the package zstandard, which is not installed: run pip install "
        "'zeropp-bench[lossless]', or use lossless:zlib:bf16"
    )

"""The reference's codes, scales and packing agree with other sources; layouts, sums and refusals.

That it keeps the laws of its codecs is tested in ``tests/harness/laws/test_laws.py``.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import hadamard
from torch import Tensor

from impl.codecs import reference
from impl.codecs.codec import MX_BLOCK, Blocked, Codec, IntCodec, parse
from impl.codecs.rounding_noise import Noise
from tests.impl.codecs.properties import encoded
from tests.support.strategies import blocks_of_values, codecs, rotated_codecs, stochastic_codecs

NOISE = Noise((1, 2, 3, 4))


def through(codec: Codec, x: Tensor, noise: Noise | None = None) -> Tensor:
    out = torch.empty(x.shape)
    reference.decode(codec, encoded(codec, x, noise), out)
    return out


@pytest.mark.parametrize(
    ("text", "cast"), [("fp8e4m3:2", torch.float8_e4m3fn), ("fp8e5m2:2", torch.float8_e5m2)]
)
def test_eight_bit_floats_are_those_of_torch(text: str, cast: torch.dtype) -> None:
    """Codes of all bf16 values in range, and their decoded values, are those of torch's cast."""
    codec = parse(text)
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    values = patterns[patterns.abs() <= codec.largest]  # NaN is not
    x = torch.stack([values, torch.full_like(values, codec.largest)], dim=-1)  # scale 1
    codes = encoded(codec, x)[:, 0]
    wanted = values.to(cast)
    assert len(values) > 33_000
    assert torch.equal(codes, wanted.view(torch.uint8))
    assert torch.equal(through(codec, x)[:, 0], wanted.float())


def test_four_bit_floats_are_those_of_the_table() -> None:
    """MXFP4's codes are 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; ties go to the even code."""
    sizes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    values = torch.arange(-48, 49).float() / 8
    x = torch.zeros(len(values), MX_BLOCK)
    x[:, 0], x[:, 1] = values, 6.0  # scale 1
    frames = encoded(parse("mxfp4"), x)
    for value, code in zip(values.tolist(), (frames[:, 0] & 0xF).tolist(), strict=True):
        nearest = min(range(8), key=lambda i: (abs(sizes[i] - abs(value)), i % 2))
        assert code == nearest + (8 if value < 0 else 0)
    decoded = through(parse("mxfp4"), x)[:, 0]
    assert {*decoded.abs().tolist()} == {*sizes}
    assert bool((frames[:, 16] == 127).all())  # 2^0


@given(st.sampled_from(["mxfp8", "mxfp8e5m2", "mxfp4"]), blocks_of_values(most=MX_BLOCK))
def test_shared_scales_are_the_least_powers_of_two_that_hold_the_block(text: str, x: Tensor) -> None:
    """An E8M0 byte is the biased exponent of the smallest scale with which no element saturates."""
    codec = parse(text)
    exponent = int(encoded(codec, x)[-16]) - 127
    top = x.abs().max().double().item()
    quotient = np.float32(top) / np.float32(codec.largest)  # the specification divides in fp32
    assert quotient <= 2.0**exponent
    assert exponent == -126 or quotient > 2.0 ** (exponent - 1)


def test_a_broken_shared_scale_is_255() -> None:
    """A block with an infinity has E8M0's NaN as its scale, and codes of 0."""
    frame = encoded(parse("mxfp8"), torch.tensor([1.0, torch.inf, 3.0]))
    assert frame[:3].tolist() == [0, 0, 0]
    assert frame[-16].item() == 255


@given(rotated_codecs(), st.integers(1, 100), st.integers(0, 2**31))
def test_rotations_are_hadamards(codec: Blocked, numel: int, seed: int) -> None:
    """Groups are multiplied by Sylvester's matrix divided by their size; remaining elements stay."""
    x = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    size = codec.hadamard
    whole = numel // size * size
    matrix = torch.from_numpy(hadamard(size)).double() / size
    wanted = x.double()
    wanted[:whole] = (wanted[:whole].view(-1, size) @ matrix).flatten()  # the matrix is symmetric
    assert torch.allclose(reference.rotated(codec, x).double(), wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("bits", range(2, 9))
def test_packing_is_exact_for_every_byte(bits: int) -> None:
    """Codes, in whole groups or not, unpack to themselves and are little-endian; few bits exhaustively."""
    top = 1 << bits
    if bits <= 4:
        sequences = torch.tensor(list(itertools.product(range(top), repeat=3)), dtype=torch.uint8)
    else:
        values = torch.arange(top)
        columns = [(values * factor).roll(factor) % top for factor in (1, 3, 5, 7, 9, 11, 13, 15, 17)]
        sequences = torch.stack(columns, dim=-1).to(torch.uint8)
    packed = torch.zeros((len(sequences), -(-sequences.shape[1] * bits // 8)), dtype=torch.uint8)
    reference.pack(sequences, bits, packed)
    assert torch.equal(reference.unpack(packed, bits, sequences.shape[1]), sequences)
    numbers = [sum(int(code) << (i * bits) for i, code in enumerate(row)) for row in sequences[:64]]
    wanted = [list(word.to_bytes(packed.shape[1], "little")) for word in numbers]
    assert packed[:64].tolist() == wanted


@given(
    st.one_of(codecs, stochastic_codecs), st.integers(1, 4), st.integers(1, 3), st.integers(1, 40),
    st.integers(0, 2**31),
)  # fmt: skip
def test_batches_and_strides_do_not_matter(codec: Codec, a: int, b: int, numel: int, seed: int) -> None:
    """A strided batch encodes to the frames of its rows, and decodes into strided memory."""
    x = torch.randn(b, a, numel, generator=torch.Generator().manual_seed(seed)).transpose(0, 1)
    frames = encoded(codec, x, replace(NOISE, strides=(400, 80)))
    out = torch.empty(b, a, numel).transpose(0, 1)
    reference.decode(codec, frames, out)
    for i, j in itertools.product(range(a), range(b)):
        row, noise = x[i, j].contiguous(), replace(NOISE, start=400 * i + 80 * j)
        assert torch.equal(frames[i, j], encoded(codec, row, noise))
        assert torch.equal(out[i, j], through(codec, row, noise))


@given(
    codecs,
    st.integers(1, 9),
    st.integers(1, 60),
    st.integers(0, 2**31),
    st.sampled_from([1e-7, 1.0, 3e4, 1e6]),
)
def test_a_sum_in_fp16_is_numpys(codec: Codec, sources: int, numel: int, seed: int, scale: float) -> None:
    """Sums in fp16 are NumPy's, term by term, and not finite if a term or sum is beyond 65504."""
    x = scale * torch.randn(sources, numel, generator=torch.Generator().manual_seed(seed))
    out, terms = torch.empty(numel), through(codec, x)
    reference.decode_sum(codec, encoded(codec, x), out, sums="fp16")
    wanted = np.zeros(numel, np.float16)
    with np.errstate(over="ignore", invalid="ignore"):
        for term in terms.numpy():
            wanted = wanted + term.astype(np.float16)
    assert np.array_equal(out.numpy(), wanted.astype(np.float32), equal_nan=True)
    assert not bool(out.isfinite()[terms.abs().amax(0) >= 65520].any())


@pytest.mark.parametrize(
    ("bits", "unclipped", "clipped", "mean"), [(8, 4.80e-5, 4.86e-5, 1.0), (4, 0.0158, 0.0125, 1.13)]
)
def test_scale_rules_err_on_normal_numbers_as_stated(
    bits: int, unclipped: float, clipped: float, mean: float
) -> None:
    """Both scale rules have the vNMSE in codecs.md for blocks of 256, and their mean errors the stated ratio."""
    x = torch.randn(4096, 256, generator=torch.Generator().manual_seed(0)).flatten()
    errors = [through(IntCodec(bits, 256, clipped=cut), x) - x for cut in (False, True)]
    vnmse = [float((e**2).sum() / (x**2).sum()) for e in errors]
    assert vnmse == pytest.approx([unclipped, clipped], rel=0.02)
    assert float(errors[0].abs().mean() / errors[1].abs().mean()) == pytest.approx(mean, abs=0.015)

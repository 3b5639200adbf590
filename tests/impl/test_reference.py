"""The reference kernels keep exactly the laws that their codecs declare."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from impl import reference
from impl.codec import Codec, IntCodec, Law, Raw, parse
from tests.strategies import blocks_of_values, codecs, int_codecs

OUT = st.sampled_from(["fp32", "bf16", "fp16"])


def through(codec: Codec, x: Tensor, out: torch.dtype = torch.float32) -> Tensor:
    """``x`` encoded and decoded."""
    frames = torch.full((*x.shape[:-1], codec.frame_bytes(x.shape[-1])), 0xA5, dtype=torch.uint8)
    reference.encode(codec, x, frames)
    result = torch.empty(x.shape, dtype=out)
    reference.decode(codec, frames, result)
    return result


def block_slices(codec: Codec, numel: int) -> list[slice]:
    """Where the codec's blocks lie; a raw element is a block of its own."""
    size = 1 if isinstance(codec, Raw) else numel if codec.block == "shard" else codec.block
    return [slice(start, min(start + size, numel)) for start in range(0, numel, size)]


@given(codecs, blocks_of_values(), OUT)
@example(parse("int4:8"), torch.tensor([-1e-45, 0.0, 1e-45]), "fp32")
@example(parse("int8:shard"), torch.tensor([3.4028234e38, -3.4028234e38, 1.0]), "fp32")
@example(parse("int3:shard:asym"), torch.tensor([3.4028234e38, -3.4028234e38, 1.0]), "fp32")
def test_error_is_within_the_declared_bound(codec: Codec, x: Tensor, out: str) -> None:
    """The error of every element is within its block's bound, for every output type."""
    largest = {"fp32": 3.4e38, "bf16": 3.3e38, "fp16": 65504.0}
    limit = largest[out]
    if isinstance(codec, Raw):  # a cast, which does not saturate: stay where bf16 rounds below fp16's top
        limit = min(limit, largest[codec.dtype], 65000.0 if out == "fp16" else math.inf)
    x = x.clamp(-limit, limit)
    got = through(codec, x, reference.DTYPES[out]).double()
    for where in block_slices(codec, x.numel()):
        block = x[where].double()
        low, high = block.min().item(), block.max().item()
        bound = codec.error_bound(low, high, out)
        assert (got[where] - block).abs().max().item() <= bound


@given(codecs, st.integers(1, 100))
def test_zeros_stay_zero(codec: Codec, numel: int) -> None:
    """Zeros decode to zeros."""
    assert Law.ZERO in codec.laws
    assert torch.equal(through(codec, torch.zeros(numel)), torch.zeros(numel))


@given(codecs.filter(lambda codec: Law.IDEMPOTENT in codec.laws), blocks_of_values())
def test_encoding_what_was_decoded_changes_nothing(codec: Codec, x: Tensor) -> None:
    """A second trip gives the same values, within an ulp of the scale."""
    x = x.clamp(-6e4, 6e4) if codec == Raw("fp16") else x.clamp(-3e38, 3e38)
    once = through(codec, x)
    assert torch.allclose(through(codec, once), once, rtol=3e-7, atol=0)


@given(codecs.filter(lambda codec: Law.SIGN in codec.laws), blocks_of_values())
def test_sign_symmetry(codec: Codec, x: Tensor) -> None:
    """Encoding -x decodes to minus what x decodes to."""
    assert torch.equal(through(codec, -x), -through(codec, x))


@given(int_codecs(), st.integers(-20, 20), st.integers(0, 2**31))
def test_scaling_by_powers_of_two_commutes(codec: IntCodec, power: int, seed: int) -> None:
    """Away from the ends of the range, scaling by 2^k before or after gives the same bits."""
    x = torch.randn(64, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(through(codec, x * 2.0**power), through(codec, x) * 2.0**power)


@given(int_codecs(), blocks_of_values(finite=False))
def test_nonfinite_values_are_never_silently_finite(codec: IntCodec, x: Tensor) -> None:
    """A block with a NaN or an infinity decodes to NaN everywhere; other blocks are untouched."""
    got = through(codec, x)
    for where in block_slices(codec, x.numel()):
        assert got[where].isnan().all() == (not x[where].isfinite().all())


@given(st.sampled_from(["fp32", "bf16", "fp16"]), blocks_of_values(finite=False))
def test_raw_codecs_keep_nonfinite_values(dtype: str, x: Tensor) -> None:
    """A raw codec is a cast: NaN stays NaN and infinities stay."""
    got = through(Raw(dtype), x)
    cast = x.to(reference.DTYPES[dtype]).float()
    assert torch.equal(got.nan_to_num(7), cast.nan_to_num(7))
    assert torch.equal(got.isnan(), cast.isnan())


@pytest.mark.parametrize("bits", range(2, 9))
def test_packing_is_exact_for_every_byte(bits: int) -> None:
    """Every sequence of codes unpacks to itself, exhaustively where the space is small."""
    top = 1 << bits
    if bits <= 4:
        sequences = torch.tensor(list(itertools.product(range(top), repeat=3)), dtype=torch.uint8)
    else:
        values = torch.arange(top, dtype=torch.int32).to(torch.uint8)
        sequences = torch.stack([values, values.flip(0), values.roll(7), values ^ 1, values], dim=-1)
    packed = torch.zeros((len(sequences), -(-sequences.shape[1] * bits // 8)), dtype=torch.uint8)
    reference._pack(sequences, bits, packed)
    assert torch.equal(reference._unpack(packed, bits, sequences.shape[1]), sequences)
    words = [sum(int(code) << (i * bits) for i, code in enumerate(row)) for row in sequences[:64]]
    wanted = [list(word.to_bytes(packed.shape[1], "little")) for word in words]
    assert packed[:64].tolist() == wanted


@given(codecs, st.integers(1, 4), st.integers(1, 3), st.integers(1, 40), st.integers(0, 2**31))
def test_batches_and_strides_do_not_matter(codec: Codec, a: int, b: int, numel: int, seed: int) -> None:
    """A strided batch encodes to the frames of its rows, and decodes into strided places."""
    x = torch.randn(b, a, numel, generator=torch.Generator().manual_seed(seed)).transpose(0, 1)
    frames = torch.empty(a, b, codec.frame_bytes(numel), dtype=torch.uint8)
    reference.encode(codec, x, frames)
    out = torch.empty(b, a, numel).transpose(0, 1)
    reference.decode(codec, frames, out)
    for i, j in itertools.product(range(a), range(b)):
        alone = torch.empty(codec.frame_bytes(numel), dtype=torch.uint8)
        reference.encode(codec, x[i, j].contiguous(), alone)
        assert torch.equal(frames[i, j], alone)
        assert torch.equal(out[i, j], through(codec, x[i, j].contiguous()))


@given(codecs, st.integers(1, 5), st.integers(1, 60), st.integers(0, 2**31))
def test_sum_is_in_ascending_order(codec: Codec, sources: int, numel: int, seed: int) -> None:
    """The sum over sources equals adding them one by one, in order, in fp32."""
    x = torch.randn(sources, numel, generator=torch.Generator().manual_seed(seed))
    frames = torch.empty(sources, codec.frame_bytes(numel), dtype=torch.uint8)
    reference.encode(codec, x, frames)
    out = torch.empty(numel)
    reference.decode_sum(codec, frames, out)
    wanted = through(codec, x[0])
    for row in x[1:]:
        wanted = wanted + through(codec, row)
    assert torch.equal(out, wanted)


def test_wrong_frames_are_refused_with_sizes() -> None:
    """A frame of the wrong size raises, naming both sizes."""
    with pytest.raises(ValueError, match=r"int8:4: \(9,\) elements need frames of 32 uint8, got \(33,\)"):
        reference.encode(parse("int8:4"), torch.zeros(9), torch.zeros(33, dtype=torch.uint8))


@given(int_codecs(st.sampled_from([1, 4, 8])), st.integers(1, 6), st.integers(0, 2**31))
def test_gather_then_quantise_equals_quantise_then_gather(codec: IntCodec, shards: int, seed: int) -> None:
    """With shards cut on block boundaries, encoding each and joining equals encoding the whole."""
    x = torch.randn(shards * 32, generator=torch.Generator().manual_seed(seed))
    apart = torch.cat([through(codec, part.contiguous()) for part in x.split(32)])
    assert torch.equal(apart, through(codec, x))

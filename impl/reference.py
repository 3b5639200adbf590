"""The kernels in plain PyTorch: the specification that every other backend must equal bit for bit.

Shapes: a frame is ``(F,)`` uint8 with ``F = codec.frame_bytes(S)``; leading dimensions are
batches of frames, and may be strided, so that a transpose costs no copy.  ``S`` is the number of
elements of a shard.  Arithmetic: fp32, division by the scale (never multiplication by its
reciprocal), nearest-even, sums in ascending source order.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from impl.codec import (
    LARGEST,
    SCALE_BYTES,
    SMALLEST_NORMAL,
    Codec,
    IntCodec,
    Raw,
    padded_bytes,
)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def encode(codec: Codec, x: Tensor, frames: Tensor) -> None:
    """Write the frames of ``x``.

    Args:
        codec: how.
        x: (..., S) fp32, bf16 or fp16; any strides.
        frames: (..., F) uint8, the last dimension contiguous; overwritten, padding included.

    Raises:
        ValueError: if the frames have the wrong size for S elements.
    """
    check(codec, x, frames)
    if isinstance(codec, Raw):
        _raw_view(codec, frames, x.shape[-1]).copy_(x)
        _zero_padding(frames, codec.code_bytes(x.shape[-1]), frames.shape[-1])
    else:
        _encode_int(codec, x, frames)


def decode(codec: Codec, frames: Tensor, out: Tensor) -> None:
    """Write the elements of ``frames`` to ``out``.

    Args:
        codec: how they were encoded.
        frames: (..., F) uint8.
        out: (..., S) fp32, bf16 or fp16; any strides.

    Raises:
        ValueError: if the frames have the wrong size for S elements.
    """
    check(codec, out, frames)
    if isinstance(codec, Raw):
        out.copy_(_raw_view(codec, frames, out.shape[-1]))
    else:
        out.copy_(_decode_int(codec, frames, out.shape[-1], LARGEST[NAMES[out.dtype]]))


def decode_sum(codec: Codec, frames: Tensor, out: Tensor) -> None:
    """Write the sum over sources, in ascending order and fp32, to ``out``.

    Args:
        codec: how the frames were encoded.
        frames: (sources, ..., F) uint8.
        out: (..., S) fp32.

    Raises:
        ValueError: if the frames have the wrong size for S elements.
    """
    check(codec, out, frames[0])
    decode(codec, frames[0], out)
    numel = out.shape[-1]
    for source in frames[1:]:
        if isinstance(codec, Raw):
            out.add_(_raw_view(codec, source, numel))
        else:
            out.add_(_decode_int(codec, source, numel, LARGEST["fp32"]))


def decode_sum_encode(first: Codec, second: Codec, frames: Tensor, out: Tensor, numel: int) -> None:
    """Write the frames of the fp32 sum over sources: the middle of a two-hop reduction.

    Args:
        first: how the frames were encoded.
        second: how their sum is.
        frames: (sources, ..., F) uint8, F of ``first``.
        out: (..., F') uint8, F' of ``second``.
        numel: elements S of a shard.

    Raises:
        ValueError: if the frames have the wrong size for S elements.
    """
    held = torch.empty((*out.shape[:-1], numel), dtype=torch.float32, device=out.device)
    decode_sum(first, frames, held)
    encode(second, held, out)


def check(codec: Codec, x: Tensor, frames: Tensor) -> None:
    """Refuse frames that do not fit ``x``.

    Raises:
        ValueError: naming both sizes.
    """
    want = codec.frame_bytes(x.shape[-1])
    if frames.dtype != torch.uint8 or frames.shape[-1] != want or frames.shape[:-1] != x.shape[:-1]:
        raise ValueError(
            f"{codec}: {tuple(x.shape)} elements need frames of {want} uint8, got "
            f"{tuple(frames.shape)} {frames.dtype}"
        )


def _raw_view(codec: Raw, frames: Tensor, numel: int) -> Tensor:
    """(..., S) view of the frames' elements in their own type."""
    return frames[..., : codec.code_bytes(numel)].view(DTYPES[codec.dtype])


def _zero_padding(frames: Tensor, start: int, end: int) -> None:
    if start < end:
        frames[..., start:end] = 0


def _block_size(codec: IntCodec, numel: int) -> int:
    return numel if codec.block == "shard" else codec.block


def _blocked(codec: IntCodec, x: Tensor) -> Tensor:
    """(..., blocks, block) fp32 copy of ``x``; a short last block repeats its last element.

    Repeating (not zero) keeps the tail out of minimum, maximum and non-finiteness.
    """
    numel, block = x.shape[-1], _block_size(codec, x.shape[-1])
    blocks = codec.blocks(numel)
    full = x.new_empty((*x.shape[:-1], blocks * block), dtype=torch.float32)
    full[..., :numel] = x
    if numel < blocks * block:
        full[..., numel:] = x[..., -1:].float()
    return full.view(*x.shape[:-1], blocks, block)


def _encode_int(codec: IntCodec, x: Tensor, frames: Tensor) -> None:
    numel = x.shape[-1]
    codes_end = codec.code_bytes(numel)
    scales_at = padded_bytes(codes_end)
    blocks = codec.blocks(numel)
    if numel == 0:
        return
    values = _blocked(codec, x)  # (..., blocks, block)
    low, high = values.aminmax(dim=-1, keepdim=True)  # both propagate NaN
    if codec.asymmetric:
        first, last = 0, (1 << codec.bits) - 1
        low = low + 0.0  # which zero the minimum is depends on the order: both are stored as 0
        # high / n - low / n, not (high - low) / n: the difference may overflow.
        steps = torch.full_like(low, last)
        scale = torch.clamp(high / steps - low / steps, min=SMALLEST_NORMAL)
        codes = _offset(values, low, scale)
        broken = ~(torch.isfinite(low) & torch.isfinite(high))
    else:
        last = (1 << (codec.bits - 1)) - 1
        first = -last
        absmax = torch.maximum(-low, high)
        scale = torch.clamp(absmax / torch.full_like(absmax, last), min=SMALLEST_NORMAL)
        codes = values.div_(scale)
        broken = ~torch.isfinite(absmax)
    codes.round_().clamp_(first, last)
    if broken.any():  # a NaN or an infinity must not decode to something finite: scale NaN, codes 0
        low = low.masked_fill(broken, 0.0)
        scale = scale.masked_fill(broken, math.nan)
        codes.masked_fill_(broken, 0.0)
    integers = codes.to(torch.uint8) if codec.asymmetric else codes.to(torch.int8).view(torch.uint8)
    _pack(integers.view(*x.shape[:-1], -1)[..., :numel], codec.bits, frames[..., :codes_end])
    _zero_padding(frames, codes_end, scales_at)
    ends = scales_at + SCALE_BYTES * blocks
    frames[..., scales_at:ends] = scale.squeeze(-1).contiguous().view(torch.uint8)
    if codec.asymmetric:
        frames[..., ends : ends + SCALE_BYTES * blocks] = low.squeeze(-1).contiguous().view(torch.uint8)
        ends += SCALE_BYTES * blocks
    _zero_padding(frames, ends, frames.shape[-1])


def _offset(values: Tensor, low: Tensor, scale: Tensor) -> Tensor:
    """``(values - low) / scale`` in place, without overflow of the difference: halves are exact."""
    return values.mul_(0.5).sub_(low * 0.5).div_(scale * 0.5)


def _decode_int(codec: IntCodec, frames: Tensor, numel: int, largest: float) -> Tensor:
    """(..., S) fp32, saturated at +-``largest``."""
    lead = frames.shape[:-1]
    if numel == 0:
        return frames.new_empty((*lead, 0), dtype=torch.float32)
    codes_end = codec.code_bytes(numel)
    scales_at = padded_bytes(codes_end)
    blocks, block = codec.blocks(numel), _block_size(codec, numel)
    codes = _unpack(frames[..., :codes_end], codec.bits, numel)
    if not codec.asymmetric:
        half = 1 << (codec.bits - 1)
        codes = (codes.bitwise_xor_(half) - half).view(torch.int8)  # sign extension
    scale = _floats(frames, scales_at, blocks)
    values = torch.zeros((*lead, blocks * block), dtype=torch.float32, device=frames.device)
    values[..., :numel] = codes
    values = values.view(*lead, blocks, block)
    if codec.asymmetric:  # in halves: q * scale alone may exceed the largest fp32
        low = _floats(frames, scales_at + SCALE_BYTES * blocks, blocks)
        values.mul_(scale * 0.5).add_(low * 0.5).mul_(2.0)
    else:
        values.mul_(scale)
    return values.clamp_(-largest, largest).view(*lead, -1)[..., :numel]


def _floats(frames: Tensor, start: int, count: int) -> Tensor:
    """(..., count, 1) fp32 stored at byte ``start``."""
    return frames[..., start : start + SCALE_BYTES * count].contiguous().view(torch.float32).unsqueeze(-1)


def _pack(codes: Tensor, bits: int, out: Tensor) -> None:
    """Write the low ``bits`` of (..., S) uint8 codes as a little-endian bit stream of (..., bytes)."""
    if bits == 8:
        out.copy_(codes)
        return
    numel, width = codes.shape[-1], math.gcd(8, bits)
    group = 8 // width  # codes that fill whole bytes, bits * group / 8 of them
    groups = -(-numel // group)
    padded = codes.new_zeros((*codes.shape[:-1], groups * group))
    torch.bitwise_and(codes, (1 << bits) - 1, out=padded[..., :numel])
    padded = padded.view(*codes.shape[:-1], groups, group)
    if bits == width:  # 2 and 4: a byte holds whole codes
        stream = padded[..., 0].clone()
        for index in range(1, group):
            stream |= padded[..., index] << (bits * index)
    else:
        shifts = torch.arange(0, group * bits, bits, device=codes.device)
        words = (padded.long() << shifts).sum(dim=-1, keepdim=True)  # at most 8 * 7 = 56 bits
        byte_shifts = torch.arange(0, group * bits, 8, device=codes.device)
        stream = ((words >> byte_shifts) & 0xFF).view(*codes.shape[:-1], -1)
    out.copy_(stream[..., : out.shape[-1]])


def _unpack(packed: Tensor, bits: int, numel: int) -> Tensor:
    """(..., S) uint8 codes below 2^bits, a copy, from a bit stream."""
    if bits == 8:
        return packed.clone()
    width = math.gcd(8, bits)
    group = 8 // width
    groups, lead = -(-numel // group), packed.shape[:-1]
    codes = packed.new_empty((*lead, groups, group))
    if bits == width:
        for index in range(group):
            codes[..., index] = (packed >> (bits * index)) & ((1 << bits) - 1)
    else:
        size = group * bits // 8  # bytes of a group
        stream = packed.new_zeros((*lead, groups * size), dtype=torch.int64)
        stream[..., : packed.shape[-1]] = packed
        byte_shifts = torch.arange(0, size * 8, 8, device=packed.device)
        words = (stream.view(*lead, groups, size) << byte_shifts).sum(dim=-1, keepdim=True)
        shifts = torch.arange(0, group * bits, bits, device=packed.device)
        codes.copy_((words >> shifts) & ((1 << bits) - 1))
    return codes.view(*lead, -1)[..., :numel]

"""Runs a user's own codec on rows of any shape and type; its object knows one row, of types that it lists.

Elements of another type go through fp32.  What an object reads is a copy: it may not spoil a master shard, or
another rank's message.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from impl.codecs.codec import CodecError, OwnCodec
from impl.codecs.rounding_noise import Noise

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def by_rows(function: Callable[..., None], *, stochastic: bool = False) -> Callable[..., None]:
    """Lift a function of one row, which may take its random bits, to rows (..., S)."""

    def all_rows(source: Tensor, target: Tensor, noise: Noise | None = None) -> None:
        for row in itertools.product(*map(range, source.shape[:-1])):
            random: tuple[Noise, ...] = ()
            if noise is not None and stochastic:
                start = noise.start + sum(i * stride for i, stride in zip(row, noise.strides, strict=True))
                random = (Noise(noise.philox, start),)
            read, written = source[row], target[row]
            before = tuple(read.shape), tuple(written.shape)
            function(read, written, *random)
            if (after := (tuple(read.shape), tuple(written.shape))) != before:
                raise CodecError(f"a codec's method was given tensors {before}, and made them {after}")

    return all_rows


def encode(codec: OwnCodec, x: Tensor, frames: Tensor, noise: Noise | None) -> None:
    """Write the frames (..., F) uint8 of ``x`` (..., S)."""
    frame = frames[..., : codec.own_bytes(x.shape[-1])]  # without our padding
    frames[..., frame.shape[-1] :] = 0
    source = _known(codec, x).clone(memory_format=torch.contiguous_format)
    by_rows(codec.thing.encode, stochastic=codec.stochastic)(source, frame, noise)


def decode(codec: OwnCodec, frames: Tensor, out: Tensor) -> None:
    """Write the elements (..., S) of ``frames`` (..., F) uint8, saturated where ``out`` is narrower."""
    kind = _known(codec, out[..., :0]).dtype
    held = torch.empty(out.shape, dtype=kind, device=out.device)
    by_rows(codec.thing.decode)(frames[..., : codec.own_bytes(out.shape[-1])].clone(), held)
    largest = torch.finfo(out.dtype).max
    out.copy_(held if kind == out.dtype else torch.where(held.isinf(), held, held.clamp(-largest, largest)))


def decode_sum(codec: OwnCodec, frames: Tensor, out: Tensor) -> None:
    """Write the fp32 sum (..., S) of ``frames`` (sources, ..., F), in ascending order."""
    if (function := codec.thing.decode_sum) is not None:
        held = torch.empty(out.shape, dtype=out.dtype, device=out.device)
        own = frames[..., : codec.own_bytes(out.shape[-1])].clone()
        rows = own.movedim(0, -2).reshape(-1, own.shape[0], own.shape[-1])  # (rows, sources, F)
        for row, one in zip(rows, held.view(-1, held.shape[-1]), strict=True):
            function(row, one)
        out.copy_(held)
        return
    decode(codec, frames[0], out)
    one = torch.empty_like(out)
    for source in frames[1:]:
        decode(codec, source, one)
        out.add_(one)


def decoded_sha256(codec: OwnCodec) -> str:
    """SHA-256 of what one row of numbers is after ``codec``; the same on all ranks, as weights must be."""
    numel = codec.grain * -(-256 // codec.grain)
    x = torch.linspace(-3, 3, numel, device=codec.thing.tried_on)  # (S,)
    frame = torch.zeros(codec.frame_bytes(numel), dtype=torch.uint8, device=x.device)
    encode(codec, x, frame, Noise((0, 0, 0, 0)) if codec.stochastic else None)
    decode(codec, frame, x)
    return hashlib.sha256(x.cpu().numpy().tobytes()).hexdigest()


def _known(codec: OwnCodec, x: Tensor) -> Tensor:
    """``x`` in a type that the object takes."""
    kinds = codec.thing.kinds
    if any(_DTYPES[kind] == x.dtype for kind in kinds):
        return x
    if "fp32" not in kinds:
        raise CodecError(f"{codec}: its kinds are {', '.join(kinds)}, and it was given {x.dtype}; add fp32")
    return x.float()

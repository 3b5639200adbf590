"""Runs a user's codec on rows of any shape and type; its methods take one row, of the types that it lists.

Other types go through fp32.  Methods read copies, so they cannot change a master shard or another rank's
message.
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
    source = _cast(codec, x).clone(memory_format=torch.contiguous_format)
    by_rows(codec.definition.encode, stochastic=codec.stochastic)(source, frame, noise)


def decode(codec: OwnCodec, frames: Tensor, out: Tensor) -> None:
    """Write the elements (..., S) of ``frames`` (..., F) uint8, saturated where ``out`` is narrower."""
    kind = _cast(codec, out[..., :0]).dtype
    x = torch.empty(out.shape, dtype=kind, device=out.device)
    by_rows(codec.definition.decode)(frames[..., : codec.own_bytes(out.shape[-1])].clone(), x)
    largest = torch.finfo(out.dtype).max
    out.copy_(x if kind == out.dtype else torch.where(x.isinf(), x, x.clamp(-largest, largest)))


def decode_sum(codec: OwnCodec, frames: Tensor, out: Tensor) -> None:
    """Write the fp32 sum (..., S) of ``frames`` (sources, ..., F), in ascending order."""
    if (function := codec.definition.decode_sum) is not None:
        sums = torch.empty(out.shape, dtype=out.dtype, device=out.device)
        codes = frames[..., : codec.own_bytes(out.shape[-1])].clone()
        rows = codes.movedim(0, -2).reshape(-1, codes.shape[0], codes.shape[-1])  # (rows, sources, F)
        for row, total in zip(rows, sums.view(-1, sums.shape[-1]), strict=True):
            function(row, total)
        out.copy_(sums)
        return
    decode(codec, frames[0], out)
    term = torch.empty_like(out)
    for source in frames[1:]:
        decode(codec, source, term)
        out.add_(term)


def decoded_sha256(codec: OwnCodec) -> str:
    """SHA-256 of a row of numbers, encoded and decoded; equal on all ranks, as weights must be."""
    numel = codec.grain * -(-256 // codec.grain)
    x = torch.linspace(-3, 3, numel, device=codec.definition.tried_on)  # (S,)
    frame = torch.zeros(codec.frame_bytes(numel), dtype=torch.uint8, device=x.device)
    encode(codec, x, frame, Noise((0, 0, 0, 0)) if codec.stochastic else None)
    decode(codec, frame, x)
    return hashlib.sha256(x.cpu().numpy().tobytes()).hexdigest()


def _cast(codec: OwnCodec, x: Tensor) -> Tensor:
    """``x`` in a type that the object takes."""
    kinds = codec.definition.kinds
    if any(_DTYPES[kind] == x.dtype for kind in kinds):
        return x
    if "fp32" not in kinds:
        raise CodecError(f"{codec}: its kinds are {', '.join(kinds)}, and it was given {x.dtype}; add fp32")
    return x.float()

"""Runs a user's codec on tensors of any shape and type, by calling the codec's methods once for each row.

Elements of a type that is not in the codec's ``kinds`` are converted to and from fp32.  The codec's methods read
copies, so they cannot change a master shard (the fp32 weights of a rank) or another rank's message.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from impl.codecs.codec import Codec, CodecError, OwnCodec
from impl.codecs.rounding_noise import Noise

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def by_rows(function: Callable[..., None], *, stochastic: bool = False) -> Callable[..., None]:
    """Returns a function that applies ``function``, which takes one row, to all rows of tensors.

    The returned function is called with two tensors, source and target, whose leading dimensions are equal, and
    optionally with a noise (random bits).  For every row it calls ``function(source row, target row)``.  If
    ``stochastic`` is True and there is a noise, it passes the random bits of the row as a third argument.

    The returned function raises CodecError if ``function`` changes the shape of a row.
    """

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
                raise CodecError(
                    f"a codec's method changed the shapes of its tensors from {before} to {after}: write to the "
                    "tensors that the method is given, and leave their shapes as they are"
                )

    return all_rows


def encode(codec: OwnCodec, x: Tensor, frames: Tensor, noise: Noise | None) -> None:
    """Encode ``x`` (..., S) with a user's codec to ``frames`` (..., F) uint8; padding bytes are set to 0.

    Each row of S elements becomes a frame of F bytes.  ``noise`` has the random bits for a codec that rounds
    stochastically; other codecs ignore it.
    """
    frame = frames[..., : codec.own_bytes(x.shape[-1])]  # the user's codec does not see the padding
    frames[..., frame.shape[-1] :] = 0
    source = _cast(codec, x).clone(memory_format=torch.contiguous_format)
    by_rows(codec.definition.encode, stochastic=codec.stochastic)(source, frame, noise)


def decode(codec: OwnCodec, frames: Tensor, out: Tensor) -> None:
    """Decode ``frames`` (..., F) uint8 with a user's codec to ``out`` (..., S).

    Elements are rounded to the type of ``out``.  Finite elements beyond the largest number of this type become this
    number.
    """
    kind = _cast(codec, out[..., :0]).dtype
    x = torch.empty(out.shape, dtype=kind, device=out.device)
    by_rows(codec.definition.decode)(frames[..., : codec.own_bytes(out.shape[-1])].clone(), x)
    largest = torch.finfo(out.dtype).max
    out.copy_(x if kind == out.dtype else torch.where(x.isinf(), x, x.clamp(-largest, largest)))


def decode_sum(codec: OwnCodec, frames: Tensor, out: Tensor) -> None:
    """Decode ``frames`` (sources, ..., F) uint8 with a user's codec, and write their sum to ``out`` (..., S) fp32.

    A row of ``out`` is the sum of one frame from each source (a rank that has sent frames).  If the codec's object has
    a method ``decode_sum``, this method decodes and adds up the frames of each row.  Otherwise the decoded frames are
    added in ascending order of their sources.
    """
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


def used_bytes(codec: Codec, frames: Tensor) -> int:
    """Returns how many bytes hold data in all ``frames`` (..., F) uint8 together.

    If the codec's object has a method ``used_bytes()``, this method counts the bytes of each frame.  Lossless codecs,
    for example, have this method, since they leave the end of a frame empty.  The frames of all other codecs count in
    full.
    """
    function = codec.definition.used_bytes if isinstance(codec, OwnCodec) else None
    if function is None:
        return frames.numel()
    return sum(int(function(frame)) for frame in frames.view(-1, frames.shape[-1]))


def decoded_sha256(codec: OwnCodec) -> str:
    """Encodes and decodes a fixed row of numbers, and returns the SHA-256 of the decoded row in hexadecimal digits.

    Callers compare the hashes of all ranks, since all ranks must decode the same bytes to the same weights.
    """
    numel = codec.grain * -(-256 // codec.grain)
    x = torch.linspace(-3, 3, numel, device=codec.definition.tried_on)  # (S,)
    frame = torch.zeros(codec.frame_bytes(numel), dtype=torch.uint8, device=x.device)
    encode(codec, x, frame, Noise((0, 0, 0, 0)) if codec.stochastic else None)
    decode(codec, frame, x)
    return hashlib.sha256(x.cpu().numpy().tobytes()).hexdigest()


def _cast(codec: OwnCodec, x: Tensor) -> Tensor:
    """Returns ``x`` if the codec takes the type of ``x``, otherwise a copy of ``x`` in fp32.

    Raises CodecError: if the codec takes neither this type nor fp32.
    """
    kinds = codec.definition.kinds
    if any(_DTYPES[kind] == x.dtype for kind in kinds):
        return x
    if "fp32" not in kinds:
        raise CodecError(
            f"{codec} takes {', '.join(kinds)} and was given {x.dtype}: add 'fp32' to the codec's kinds"
        )
    return x.float()

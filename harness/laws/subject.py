"""Wraps each implementation of a codec in a :class:`Subject`, the object that :mod:`harness.laws.laws` checks.

An implementation is one of our codecs on one backend (``reference``, ``cpu`` or ``cuda``), or a user's own codec.
``docs/reference/codecs.md`` describes how users write codecs.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import torch
from torch import Tensor

from harness.errors import Refusal
from harness.laws.laws import Subject
from impl import ops
from impl.codecs.codec import FORMATS, Codec, OwnCodec, parse
from impl.codecs.own_rows import by_rows
from impl.codecs.reference import REFERENCE
from impl.codecs.rounding_noise import Noise

BACKENDS: Final = ("reference", "cpu", "cuda")
# Codecs that are checked by default: codecs of every kind, width and option, most with blocks so small that
# adversarial rows fill several of them, and every published format.
REPRESENTATIVE: Final = (
    "fp32", "bf16", "fp16",
    "int8:64", "int7:8", "int6:24", "int5:13", "int4:32", "int3:64", "int2:5",
    "int8:shard", "int4:1", "int8:2048",
    "int8:64:asym", "int4:32:asym", "int3:7:asym", "int8:64:clip", "int4:32:clip", "int3:7:clip",
    "fp8e4m3:32", "fp8e5m2:32", "fp8e4m3:shard", "mxfp8", "mxfp8e5m2", "mxfp4",
    "int8:64:hadamard16", "int4:64:hadamard32", "mxfp4:hadamard8",
    "int8:64:stochastic", "int4:32:stochastic", "int4:32:asym:stochastic",
    "fp8e4m3:32:stochastic", "mxfp4:stochastic", "int4:32:hadamard8:stochastic",
    *FORMATS,
)  # fmt: skip


def why_missing(backend: str) -> str | None:
    """Return why ``backend`` is not available on this machine; None if it is available."""
    if backend not in BACKENDS:
        return f"unknown backend {backend!r}: expected one of {', '.join(BACKENDS)}"
    try:
        ops.operations_of(backend)
    except ValueError as error:
        return str(error)
    if backend == "cuda" and not torch.cuda.is_available():
        return "backend 'cuda': torch finds no CUDA device"
    return None


def subject_of(codec: Codec, backend: str) -> Subject:
    """Return the implementation of ``codec`` on a backend, wrapped as a :class:`Subject` so that it can be checked.

    Args:
        codec: One of our codecs, or one of the published formats (:data:`~impl.codecs.codec.FORMATS`).
        backend: ``reference``, ``cpu`` or ``cuda``.

    Raises:
        ValueError: If this machine lacks the backend.
    """
    operations = ops.operations_of(backend)

    def encode(x: Tensor, frames: Tensor, noise: Noise) -> None:
        operations.encode(codec, x, frames, noise=noise if codec.stochastic else None)

    def decode_sum_encode(frames: Tensor, out: Tensor, numel: int, noise: Noise) -> None:
        random = noise if codec.stochastic else None
        operations.decode_sum_encode(codec, codec, frames, out, numel, noise=random)

    return Subject(
        name=f"{codec} on {backend}",
        promises=codec,
        frame_bytes=codec.frame_bytes,
        encode=encode,
        decode=partial(operations.decode, codec),
        decode_sum=partial(operations.decode_sum, codec),
        decode_sum_encode=decode_sum_encode,
        device=torch.device("cuda" if backend == "cuda" else "cpu"),
        codec=codec,
        specification=operations is REFERENCE,
    )


def read(text: str) -> Codec | Subject:
    """Parse the name of a codec, such as ``int8:2048``, or of a user's own codec, ``module:object``.

    Returns:
        Our codec or published format; for a user's own codec, a :class:`Subject` that wraps it.

    Raises:
        Refusal: If the text names no codec, or if this machine lacks the device of a user's own codec.
    """
    try:
        codec = parse(text)
        return user_subject(codec) if isinstance(codec, OwnCodec) and not codec.published else codec
    except ValueError as error:  # a CodecError, or Python's error for numbers of thousands of digits
        raise Refusal(str(error)) from error


def user_subject(codec: OwnCodec) -> Subject:
    """Wrap a user's own codec as a :class:`Subject`, so that it can be checked.

    The subject's frame (encoded row) is exactly the bytes that the user's code writes for a row.

    Raises:
        Refusal: If this machine lacks the device that the codec is written for.
    """
    implementation, claimed = codec.definition, codec.claimed
    device = torch.device(implementation.tried_on)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise Refusal(
            f"{codec} runs on device {device}, and torch finds no CUDA device: check it on a machine with a GPU"
        )
    stochastic = codec.stochastic
    fused = implemented = implementation.decode_sum_encode
    if implemented is not None and not stochastic:  # the user's function then has no argument for random bits
        fused = lambda *arguments: implemented(*arguments[:-1])  # noqa: E731
    return Subject(
        name=codec.name,
        promises=claimed or codec,
        frame_bytes=codec.own_bytes,
        encode=by_rows(implementation.encode, stochastic=stochastic),
        decode=by_rows(implementation.decode),
        kinds=implementation.kinds,
        device=device,
        decode_sum=implementation.decode_sum,
        decode_sum_encode=fused,
        codec=claimed,
    )

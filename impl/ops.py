"""Encodes and decodes with the backend of the tensors' device, and names it.

Every backend equals the reference bit for bit.  CPU tensors use the C++ kernels, which are built on
first use; CUDA tensors the CUDA kernels, which CuPy compiles.  A machine that lacks what they need uses the
reference: :func:`backend_of` says so, and :func:`warning_of` why.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterable

import torch
from torch import Tensor

from impl.codecs.codec import FRAME_ALIGNMENT, Codec, OwnCodec, Raw, Sums, has_kernels
from impl.codecs.reference import DTYPES, NAMES, REFERENCE, Carried, Operations
from impl.codecs.rounding_noise import OCTET, Noise
from impl.cpu import build
from impl.cpu import kernels as cpu
from impl.cuda import kernels as cuda
from impl.cuda.launch import loaded_sha256, on_device


def prepare(device: torch.device, codecs: Iterable[Codec] = ()) -> None:
    """Build the kernels for ``device``, so that no later call waits for a compiler.

    On a GPU each codec is tried, so that a missing compiler is a RuntimeError here, and not in the first
    step.  A ValueError refuses a device without a backend, or one that a user's codec does not support.
    """
    operations, _ = _choose(device.type)
    codecs = dict.fromkeys(codecs)
    check_devices(device, codecs)
    if device.type == "cuda":
        for codec in codecs:
            try_codec(operations, codec, device)
        torch.cuda.synchronize(device)


def try_codec(operations: Operations, codec: Codec, device: torch.device) -> None:
    """Encode and decode one octet by a codec that has kernels; a RuntimeError names it if that fails."""
    if not has_kernels(codec):
        return
    x = torch.zeros(OCTET, device=device)
    frames = torch.zeros(codec.frame_bytes(OCTET), dtype=torch.uint8, device=device)
    try:
        operations.encode(codec, x, frames, noise=Noise((0, 0, 0, 0)) if codec.stochastic else None)
        operations.decode(codec, frames, x)
    except (ImportError, OSError, RuntimeError) as problem:
        raise RuntimeError(f"the kernels of {codec} do not run on {device}: {problem}") from problem


def check_devices(device: torch.device, codecs: Iterable[Codec]) -> None:
    """Refuse users' codecs that do not support ``device``."""
    for codec in codecs:
        target = codec.definition.device if isinstance(codec, OwnCodec) else "any"
        if target != "any" and torch.device(target).type != device.type:
            raise ValueError(f"{codec} is for {target}, and the tensors are on {device}")


def backend_of(device: torch.device) -> str:
    """Name of the kernels that serve ``device``; a ValueError for a device that has none."""
    return _choose(device.type)[0].name


def loaded_kernels(device: torch.device) -> str | None:
    """SHA-256 of the kernels that this process has loaded for ``device``; None for the reference."""
    operations, _ = _choose(device.type)
    return loaded_sha256() if isinstance(operations, cuda.Kernels) else getattr(operations, "sha256", None)


def operations_of(name: str) -> Operations:
    """The backend cpu, cuda or reference; a ValueError for another, or where this machine lacks it."""
    if name == REFERENCE.name:
        return REFERENCE
    operations, warning = _choose(name)
    if operations is REFERENCE:
        raise ValueError(f"backend {name!r}: {warning}")
    return operations


def warning_of(device: torch.device) -> str | None:
    """Why the reference serves ``device``, in one line; None where it does not."""
    return _choose(device.type)[1]


@functools.cache
def _choose(device: str) -> tuple[Operations, str | None]:
    """The operations for a type of device, and the reason if they are only the reference."""
    if device == "cpu":
        try:
            return cpu.Kernels(build.library(build.user_folder())), None
        except (build.BuildError, OSError) as problem:
            return REFERENCE, f"no C++ kernels: {problem}"
    if device == "cuda":
        if importlib.util.find_spec("cupy") is None:
            return REFERENCE, "no CUDA kernels: CuPy is not installed"
        return cuda.Kernels(on_device), None
    raise ValueError(f"no kernels for device {device}: expected one of cpu, cuda")


def encode(
    codec: Codec, x: Tensor, frames: Tensor, *, noise: Noise | None = None, carried: Carried | None = None
) -> None:
    """Write the frames (..., F) uint8 of ``x`` (..., S): :meth:`Operations.encode`."""
    if isinstance(codec, Raw) and carried is None and (elements := _cast_of(codec, x, frames)) is not None:
        elements.copy_(x)
        return
    _choose(x.device.type)[0].encode(codec, x, frames, noise=noise, carried=carried)


def decode(codec: Codec, frames: Tensor, out: Tensor) -> None:
    """Write the elements (..., S) of ``frames`` (..., F): :meth:`Operations.decode`."""
    if isinstance(codec, Raw) and (elements := _cast_of(codec, out, frames)) is not None:
        out.copy_(elements)
        return
    _choose(out.device.type)[0].decode(codec, frames, out)


def _cast_of(codec: Raw, x: Tensor, frames: Tensor) -> Tensor | None:
    """``frames`` as elements (..., S) that torch can cast ``x`` to or from; None if it cannot."""
    kind = DTYPES[codec.dtype]
    size, shape = kind.itemsize, x.shape
    if x.dtype is kind or x.dtype not in NAMES or not shape or frames.dtype is not torch.uint8:
        return None
    nbytes = shape[-1] * size
    if nbytes % FRAME_ALIGNMENT or frames.shape != (*shape[:-1], nbytes) or x.device != frames.device:
        return None
    *steps, last = frames.stride()
    for step in (frames.storage_offset(), *steps):
        if step % size:
            return None
    return frames.view(kind) if last == 1 else None


def decode_sum(codec: Codec, frames: Tensor, out: Tensor, *, sums: Sums = "fp32") -> None:
    """Write the sum (..., S) fp32 over the first dimension: :meth:`Operations.decode_sum`."""
    _choose(out.device.type)[0].decode_sum(codec, frames, out, sums=sums)


def decode_sum_encode(
    first: Codec,
    second: Codec,
    frames: Tensor,
    out: Tensor,
    numel: int,
    *,
    noise: Noise | None = None,
    carried: Carried | None = None,
    sums: Sums = "fp32",
) -> None:
    """Write the frames (..., F') of that sum: :meth:`Operations.decode_sum_encode`."""
    operations, _ = _choose(out.device.type)
    operations.decode_sum_encode(first, second, frames, out, numel, noise=noise, carried=carried, sums=sums)

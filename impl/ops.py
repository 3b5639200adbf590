"""Which kernels encode and decode: one place that chooses a backend, and says which.

Every backend offers ``encode``, ``decode``, ``decode_sum`` and ``decode_sum_encode`` with the shapes of
:mod:`impl.reference`, and equals it bit for bit.  CUDA tensors use the CUDA kernels where CuPy, which
compiles them, is installed, and the reference where it is not; :func:`backend_of` says which.
"""

from __future__ import annotations

import functools
import importlib.util
from types import ModuleType

import torch
from torch import Tensor

from impl import reference
from impl.codec import Codec
from impl.cuda import kernels


def backend_of(device: torch.device) -> str:
    """Name of the backend that serves tensors on ``device``, for the record.

    Raises:
        ValueError: for a device that has none.
    """
    return "cuda" if _choose(device.type) is kernels else "reference"


@functools.cache
def _choose(device: str) -> ModuleType:
    if device == "cpu":
        return reference
    if device == "cuda":
        return reference if importlib.util.find_spec("cupy") is None else kernels
    raise ValueError(f"no kernels for device {device}: expected one of cpu, cuda")


def encode(codec: Codec, x: Tensor, frames: Tensor) -> None:
    """Write the frames (..., F) uint8 of ``x`` (..., S); see :func:`impl.reference.encode`."""
    _choose(x.device.type).encode(codec, x, frames)


def decode(codec: Codec, frames: Tensor, out: Tensor) -> None:
    """Write the elements (..., S) of ``frames`` (..., F); see :func:`impl.reference.decode`."""
    _choose(out.device.type).decode(codec, frames, out)


def decode_sum(codec: Codec, frames: Tensor, out: Tensor) -> None:
    """Write the fp32 sum (..., S) over the first dimension; see :func:`impl.reference.decode_sum`."""
    _choose(out.device.type).decode_sum(codec, frames, out)


def decode_sum_encode(first: Codec, second: Codec, frames: Tensor, out: Tensor, numel: int) -> None:
    """Write the frames (..., F') of that sum; see :func:`impl.reference.decode_sum_encode`."""
    _choose(out.device.type).decode_sum_encode(first, second, frames, out, numel)

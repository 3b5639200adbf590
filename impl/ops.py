"""Which kernels encode and decode: one place that chooses a backend, and says which.

Every backend offers ``encode``, ``decode``, ``decode_sum`` and ``decode_sum_encode`` with the shapes of
:mod:`impl.reference`, and equals it bit for bit.  CPU tensors use the C++ kernels, which the first use
builds where no earlier one has; CUDA tensors the CUDA kernels, which CuPy compiles.  A machine that
lacks what they need uses the reference: :func:`backend_of` says so, and :func:`warning_of` why.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from impl import reference
from impl.codec import Codec
from impl.cpu import build
from impl.cpu.kernels import Kernels
from impl.cuda import kernels


@dataclass(frozen=True, slots=True)
class _Backend:
    """The operations that serve a kind of device.

    Attributes:
        name: for the record.
        operations: with the functions of the reference.
        warning: why faster ones do not.
    """

    name: str
    operations: ModuleType | Kernels
    warning: str | None = None


def prepare(device: torch.device) -> None:
    """Build what tensors on ``device`` need, so that no later call waits for a compiler.

    Raises:
        ValueError: for a device that has no backend.
    """
    _choose(device.type)


def backend_of(device: torch.device) -> str:
    """Name of the backend that serves tensors on ``device``, for the record.

    Raises:
        ValueError: for a device that has none.
    """
    return _choose(device.type).name


def warning_of(device: torch.device) -> str | None:
    """One line, for the record: why the reference serves ``device``; None where it does not.

    Raises:
        ValueError: for a device that has no backend.
    """
    return _choose(device.type).warning


@functools.cache
def _choose(device: str) -> _Backend:
    if device == "cpu":
        try:
            return _Backend("cpu", Kernels(build.library(build.user_folder())))
        except (build.BuildError, OSError) as problem:
            return _Backend("reference", reference, f"no C++ kernels: {problem}")
    if device == "cuda":
        if importlib.util.find_spec("cupy") is None:
            return _Backend("reference", reference, "no CUDA kernels: CuPy is not installed")
        return _Backend("cuda", kernels)
    raise ValueError(f"no kernels for device {device}: expected one of cpu, cuda")


def encode(codec: Codec, x: Tensor, frames: Tensor) -> None:
    """Write the frames (..., F) uint8 of ``x`` (..., S); see :func:`impl.reference.encode`."""
    _choose(x.device.type).operations.encode(codec, x, frames)


def decode(codec: Codec, frames: Tensor, out: Tensor) -> None:
    """Write the elements (..., S) of ``frames`` (..., F); see :func:`impl.reference.decode`."""
    _choose(out.device.type).operations.decode(codec, frames, out)


def decode_sum(codec: Codec, frames: Tensor, out: Tensor) -> None:
    """Write the fp32 sum (..., S) over the first dimension; see :func:`impl.reference.decode_sum`."""
    _choose(out.device.type).operations.decode_sum(codec, frames, out)


def decode_sum_encode(first: Codec, second: Codec, frames: Tensor, out: Tensor, numel: int) -> None:
    """Write the frames (..., F') of that sum; see :func:`impl.reference.decode_sum_encode`."""
    _choose(out.device.type).operations.decode_sum_encode(first, second, frames, out, numel)

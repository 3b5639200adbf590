"""Encodes and decodes with the backend of the tensors' device, and says which that is.

Every backend offers ``encode``, ``decode``, ``decode_sum`` and ``decode_sum_encode`` with the shapes of
:mod:`impl.codecs.reference`, and equals it bit for bit, for the codecs that its ``supports`` names; the
others are the reference's.  CPU tensors use the C++ kernels, which the first use builds where no earlier one
has; CUDA tensors the CUDA kernels, which CuPy compiles.  A machine that lacks what they need uses the
reference: :func:`backend_of` says so, and :func:`warning_of` why.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from impl.codecs import reference
from impl.codecs.codec import Codec, Raw
from impl.codecs.reference import Carried
from impl.codecs.rounding_noise import Noise
from impl.cpu import build
from impl.cpu.kernels import Kernels
from impl.cuda import kernels


class Operations(Protocol):
    """What a backend does; shapes and arithmetic are those of :mod:`impl.codecs.reference`."""

    def supports(self, codec: Codec) -> bool:
        """Whether it has kernels of its own for ``codec``."""

    def encode(
        self,
        codec: Codec,
        x: Tensor,
        frames: Tensor,
        *,
        noise: Noise | None = None,
        carried: Carried | None = None,
    ) -> None:
        """Write the frames of ``x``."""

    def decode(self, codec: Codec, frames: Tensor, out: Tensor) -> None:
        """Write the elements of ``frames``."""

    def decode_sum(self, codec: Codec, frames: Tensor, out: Tensor) -> None:
        """Write the sum over sources."""

    def decode_sum_encode(
        self,
        first: Codec,
        second: Codec,
        frames: Tensor,
        out: Tensor,
        numel: int,
        *,
        noise: Noise | None = None,
        carried: Carried | None = None,
    ) -> None:
        """Write the frames of the sum over sources."""


@dataclass(frozen=True, slots=True)
class _Backend:
    """The operations that serve a kind of device.

    Attributes:
        name: for the record.
        operations: of the backend.
        warning: why faster ones do not serve it.
    """

    name: str
    operations: Operations
    warning: str | None = None


def prepare(device: torch.device) -> None:
    """Build what tensors on ``device`` need, so that no later call waits for a compiler.

    Raises:
        ValueError: for a device that has no backend.
    """
    _choose(device.type)


def backend_of(device: torch.device, codec: Codec) -> str:
    """Name of the kernels that serve ``codec`` on ``device``, for the record.

    Raw codecs are casts, which every backend leaves to torch: they count as the backend's own.

    Raises:
        ValueError: for a device that has none.
    """
    backend = _choose(device.type)
    return backend.name if isinstance(codec, Raw) or backend.operations.supports(codec) else reference.NAME


def kernels_of(device: torch.device, codecs: Iterable[Codec]) -> str:
    """Which kernels serve ``codecs`` on ``device``, for the record: "cpu", or "cpu, reference for mxfp4".

    Raises:
        ValueError: for a device that has none.
    """
    others = dict.fromkeys(str(codec) for codec in codecs if backend_of(device, codec) == reference.NAME)
    own = _choose(device.type).name
    return own if own == reference.NAME or not others else f"{own}, reference for {' and '.join(others)}"


def operations_of(name: str) -> Operations:
    """The backend ``name``, whichever would be chosen: to compare one with another.

    Args:
        name: cpu, cuda or reference.

    Raises:
        ValueError: for another name, or where this machine lacks what it needs, saying what.
    """
    if name == reference.NAME:
        return reference
    backend = _choose(name)
    if backend.name != name:
        raise ValueError(f"backend {name!r}: {backend.warning}")
    return backend.operations


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
            return _Backend(reference.NAME, reference, f"no C++ kernels: {problem}")
    if device == "cuda":
        if importlib.util.find_spec("cupy") is None:
            return _Backend(reference.NAME, reference, "no CUDA kernels: CuPy is not installed")
        return _Backend("cuda", kernels)
    raise ValueError(f"no kernels for device {device}: expected one of cpu, cuda")


def encode(
    codec: Codec, x: Tensor, frames: Tensor, *, noise: Noise | None = None, carried: Carried | None = None
) -> None:
    """Write the frames (..., F) uint8 of ``x`` (..., S); see :func:`impl.codecs.reference.encode`."""
    _choose(x.device.type).operations.encode(codec, x, frames, noise=noise, carried=carried)


def decode(codec: Codec, frames: Tensor, out: Tensor) -> None:
    """Write the elements (..., S) of ``frames`` (..., F); see :func:`impl.codecs.reference.decode`."""
    _choose(out.device.type).operations.decode(codec, frames, out)


def decode_sum(codec: Codec, frames: Tensor, out: Tensor) -> None:
    """Write the fp32 sum (..., S) over the first dimension; see :func:`impl.codecs.reference.decode_sum`."""
    _choose(out.device.type).operations.decode_sum(codec, frames, out)


def decode_sum_encode(
    first: Codec,
    second: Codec,
    frames: Tensor,
    out: Tensor,
    numel: int,
    *,
    noise: Noise | None = None,
    carried: Carried | None = None,
) -> None:
    """Write the frames (..., F') of that sum; see :func:`impl.codecs.reference.decode_sum_encode`."""
    operations = _choose(out.device.type).operations
    operations.decode_sum_encode(first, second, frames, out, numel, noise=noise, carried=carried)

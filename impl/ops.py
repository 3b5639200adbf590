"""Which kernels encode and decode: one place that chooses a backend, and says which.

Every backend offers ``encode``, ``decode`` and ``decode_sum`` with the shapes of
:mod:`impl.reference`, and equals it bit for bit.
"""

from __future__ import annotations

from types import ModuleType
from typing import Final

import torch
from torch import Tensor

from impl import reference
from impl.codec import Codec

_BACKENDS: Final[dict[str, ModuleType]] = {"cpu": reference, "cuda": reference}


def backend_of(device: torch.device) -> str:
    """Name of the backend that serves tensors on ``device``, for the record.

    Raises:
        ValueError: for a device that has none.
    """
    return _choose(device).__name__.rsplit(".", 1)[-1]


def _choose(device: torch.device) -> ModuleType:
    if device.type not in _BACKENDS:
        raise ValueError(f"no kernels for device {device}: expected one of {', '.join(_BACKENDS)}")
    return _BACKENDS[device.type]


def encode(codec: Codec, x: Tensor, frames: Tensor) -> None:
    """Write the frames (..., F) uint8 of ``x`` (..., S); see :func:`impl.reference.encode`."""
    _choose(x.device).encode(codec, x, frames)


def decode(codec: Codec, frames: Tensor, out: Tensor) -> None:
    """Write the elements (..., S) of ``frames`` (..., F); see :func:`impl.reference.decode`."""
    _choose(out.device).decode(codec, frames, out)


def decode_sum(codec: Codec, frames: Tensor, out: Tensor) -> None:
    """Write the fp32 sum (..., S) over the first dimension; see :func:`impl.reference.decode_sum`."""
    _choose(out.device).decode_sum(codec, frames, out)

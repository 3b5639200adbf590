"""Defines variants of the CUDA kernels that lack an optimisation, as backends of ``zeropp bench codecs``.

All variants write the same bits as the backend ``cuda``, so that a difference in speed is due to the optimisation.
:data:`ABLATED` lists the variants.  Three variants are a series: encoding lacks one optimisation in ``cuda-general``,
two in ``cuda-shared-memory``, and three in ``cuda-two-reads``.  In this series, ``cuda-general`` also has other kernels
for decoding than ``cuda``, while the two other variants decode with the kernels of ``cuda``.  Each variant outside the
series lacks one optimisation of ``cuda``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import torch

from impl.cuda.kernels import Kernels, Part
from impl.cuda.launch import Launch

Runner = Callable[..., None]  # runs a launch on a device, like :func:`impl.cuda.launch.on_device`
_STATIC_BYTES: Final = 40 << 10  # shared memory that the kernels themselves use, at most
# Shared memory that each thread block of `cuda-few-warps` reserves without using it.  Only two such blocks fit on a
# multiprocessor of an H100.
_IDLE_BYTES: Final = 100 << 10


def narrowly(run: Runner, launch: Launch, device: torch.device) -> None:
    """Run a kernel launch as if no row of elements were aligned to 16 bytes.

    Each element is then loaded and stored by itself, and the kernels also check bounds in their main path.
    """
    for place in ("values", "frames", "output", "error"):
        launch.arguments[place]["vectors"] = 0
    launch.arguments["exact"] = 0
    run(launch, device)


def _without(*parts: Part) -> Callable[[Runner], Kernels]:
    """Return a function that takes a runner and returns kernels without the optimisations ``parts``.

    A runner is a function that runs a launch on a device.
    """
    return lambda run: Kernels(run, without=parts)


ABLATED: Final[Mapping[str, Callable[[Runner], Kernels]]] = {
    "cuda-general": _without("plain"),
    "cuda-shared-memory": _without("held"),
    "cuda-two-reads": _without("held", "staged"),
    "cuda-unfused": _without("fused"),
    "cuda-narrow": lambda run: Kernels(partial(narrowly, run)),
    "cuda-few-warps": lambda run: Kernels(partial(run, idle_bytes=_IDLE_BYTES)),
}
"""The kernels of each backend, by its name:

- ``cuda-general``: kernels that are compiled for all codecs, not for one;
- ``cuda-shared-memory``: a codec's block of elements is held in shared memory instead of registers;
- ``cuda-two-reads``: elements are read twice from global memory;
- ``cuda-unfused``: sums are written to memory before they are encoded;
- ``cuda-narrow``: elements are loaded and stored one by one;
- ``cuda-few-warps``: few thread blocks run at a time on each multiprocessor.
"""


def why_not(name: str, device: Any) -> str | None:
    """Return why a backend of :data:`ABLATED` cannot run on a GPU with properties ``device``; None if it can."""
    most = getattr(device, "shared_memory_per_block_optin", _IDLE_BYTES)
    if name == "cuda-few-warps" and most < _IDLE_BYTES + _STATIC_BYTES:
        needed = (_IDLE_BYTES + _STATIC_BYTES) >> 10
        return f"needs {needed} KiB of shared memory for a thread block, but this GPU allows {most >> 10} KiB"
    return None

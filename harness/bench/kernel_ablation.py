"""Variants of the CUDA kernels without one optimisation, as backends of ``zeropp bench codecs``.

All write the same bits as ``cuda``, so that a difference in speed is what the optimisation brings.  ``cuda``,
``cuda-general``, ``cuda-shared-memory`` and ``cuda-two-reads`` (which differs in encoding only) each have less than
the one before.  ``cuda-narrow`` also loses the main path, which does without checks of bounds.
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
# Shared memory that each thread block reserves without using it; two such blocks fit an H100's multiprocessor.
_IDLE_BYTES: Final = 100 << 10


def narrowly(run: Runner, launch: Launch, device: torch.device) -> None:
    """Run a launch as if no row were aligned to 16 bytes, so that each element is loaded and stored by itself."""
    for place in ("values", "frames", "output", "error"):
        launch.arguments[place]["vectors"] = 0
    launch.arguments["exact"] = 0
    run(launch, device)


def _without(*parts: Part) -> Callable[[Runner], Kernels]:
    """Return a function that makes kernels without these optimisations."""
    return lambda run: Kernels(run, without=parts)


ABLATED: Final[Mapping[str, Callable[[Runner], Kernels]]] = {
    "cuda-general": _without("plain"),
    "cuda-shared-memory": _without("held"),
    "cuda-two-reads": _without("held", "staged"),
    "cuda-unfused": _without("fused"),
    "cuda-narrow": lambda run: Kernels(partial(narrowly, run)),
    "cuda-few-warps": lambda run: Kernels(partial(run, idle_bytes=_IDLE_BYTES)),
}
"""By name of the backend, in order: kernels that are not compiled for one codec; blocks held in shared memory instead
of registers; elements read twice from global memory; sums written to memory before they are encoded; elements accessed
one by one; and few thread blocks at a time on each multiprocessor."""


def why_not(name: str, device: Any) -> str | None:
    """Return why a backend of :data:`ABLATED` cannot run on a GPU with properties ``device``; None if it can."""
    most = getattr(device, "shared_memory_per_block_optin", _IDLE_BYTES)
    if name == "cuda-few-warps" and most < _IDLE_BYTES + _STATIC_BYTES:
        needed = (_IDLE_BYTES + _STATIC_BYTES) >> 10
        return f"needs {needed} KiB of shared memory for a thread block, and this GPU has {most >> 10} KiB"
    return None

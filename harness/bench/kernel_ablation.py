"""The CUDA kernels with something taken away: backends of ``zeropp bench codecs``, with the same bits.

``cuda``, ``cuda-general``, ``cuda-shared-memory`` and ``cuda-two-reads`` (encoding alone) build on one
another; ``cuda-narrow`` also loses the main path, which checks no bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import torch

from impl.cuda.kernels import Kernels, Part
from impl.cuda.launch import Launch

Runner = Callable[..., None]  # runs a launch on a device, as on_device
_STATIC_BYTES: Final = 40 << 10  # of the kernels themselves, at most
_IDLE_BYTES: Final = 100 << 10  # of shared memory that a thread block reserves unused: two fit an H100's


def narrowly(run: Runner, launch: Launch, device: torch.device) -> None:
    """Carry a launch out as if no row began on 16 bytes: each element is loaded and stored by itself."""
    for place in ("values", "frames", "output", "error"):
        launch.arguments[place]["vectors"] = 0
    launch.arguments["exact"] = 0
    run(launch, device)


def _without(*parts: Part) -> Callable[[Runner], Kernels]:
    return lambda run: Kernels(run, without=parts)


ABLATED: Final[Mapping[str, Callable[[Runner], Kernels]]] = {
    "cuda-general": _without("plain"),
    "cuda-shared-memory": _without("held"),
    "cuda-two-reads": _without("held", "staged"),
    "cuda-unfused": _without("fused"),
    "cuda-narrow": lambda run: Kernels(partial(narrowly, run)),
    "cuda-few-warps": lambda run: Kernels(partial(run, idle_bytes=_IDLE_BYTES)),
}
"""By name: kernels compiled for no codec; blocks in shared memory, not in registers; elements read twice;
sums written before they are encoded; accesses of one element; few thread blocks on a multiprocessor."""


def why_not(name: str, device: Any) -> str | None:
    """Why a backend of :data:`ABLATED` cannot run on a GPU with properties ``device``; None if it can."""
    most = getattr(device, "shared_memory_per_block_optin", _IDLE_BYTES)
    if name == "cuda-few-warps" and most < _IDLE_BYTES + _STATIC_BYTES:
        needed = (_IDLE_BYTES + _STATIC_BYTES) >> 10
        return f"a thread block has {most >> 10} KiB of shared memory at most there, and it takes {needed}"
    return None

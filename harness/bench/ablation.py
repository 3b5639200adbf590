"""The CUDA kernels with one thing taken away each: backends of ``zeropp bench codecs``.

Nothing of it is compiled for the purpose: other kernels of ours serve, or the same ones are launched
otherwise.  Results are the same bits, which the tests ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import torch

from impl.cuda.kernels import Kernels, Part
from impl.cuda.launch import Launch, on_device

Runs = Callable[..., None]  # a launch and a device, as on_device
_IDLE_BYTES: Final = 100 << 10  # of shared memory that a thread block asks for and leaves: two fit an H100's


def narrowly(run: Runs, launch: Launch, device: torch.device) -> None:
    """Carry a launch out as if no row began on 16 bytes: each element is loaded and stored by itself."""
    for place in ("values", "frames", "output", "error"):
        launch.arguments[place]["vectors"] = 0
    launch.arguments["exact"] = 0
    run(launch, device)


def _without(*parts: Part) -> Callable[[Runs], Kernels]:
    return lambda run: Kernels(run, without=parts)


ABLATED: Final[Mapping[str, Callable[[Runs], Kernels]]] = {
    "cuda-general": _without("plain"),
    "cuda-shared-memory": _without("held"),
    "cuda-two-reads": _without("held", "staged"),
    "cuda-unfused": _without("fused"),
    "cuda-narrow": lambda run: Kernels(partial(narrowly, run)),
    "cuda-few-warps": lambda run: Kernels(partial(run, idle_bytes=_IDLE_BYTES)),
}
"""By name: kernels compiled for no codec; blocks in shared memory, not in registers; elements read twice;
sums written before they are encoded; accesses of one element; two thread blocks on a multiprocessor."""


def operations(name: str) -> Kernels:
    """The kernels of a backend of :data:`ABLATED`, on a device."""
    return ABLATED[name](on_device)

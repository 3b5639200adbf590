"""Launching the kernels of this folder on a CUDA device: CuPy compiles and launches, torch owns.

Every kernel takes one argument, a structure that :data:`ARGUMENTS` mirrors field by
field (``Arguments`` of ``frames.cuh``), passed by value.  The sources are files, compiled per kernel by
NVRTC the first time it is launched; CuPy keeps the results on disk.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

SOURCES: Final = Path(__file__).parent
# No fused multiply-add: bit equality with the reference.  Division and denormals are IEEE by default.
OPTIONS: Final = ("--fmad=false", "-std=c++17", f"-I{SOURCES}")

PLACE: Final = np.dtype(
    [("address", "i8"), ("stride", "i8", 3), ("inner", "i8"), ("vectors", "u4"), ("kind", "u4")]
)
CODING: Final = np.dtype(
    [
        *((name, "i8") for name in ("codes_end", "scales_at", "scales_end", "frame_bytes")),
        *((name, "u4") for name in ("bits", "special", "block", "blocks", "rotation")),
        ("shift", "i4"),
    ]
)
NOISE: Final = np.dtype(
    [("start", "i8"), ("stride", "i8", 3), ("key", "u4", 4), ("on", "u4"), ("unused", "u4")]
)
DECAY: Final = np.dtype([("old", "f4"), ("fresh", "f4")])
_PLAIN: Final = ("numel", "middle", "loops", "team_shift", "tile", "parts", "sources", "carried")
_FLAGS: Final = ("exact", "unused")
ARGUMENTS: Final = np.dtype(
    [
        *((name, "i8") for name in ("source_stride", "extents")),
        *((name, "u4") for name in (*_PLAIN, *_FLAGS)),
        *((name, PLACE) for name in ("values", "frames", "output", "error")),
        *((name, CODING) for name in ("coding", "second")),
        ("noise", NOISE),
        ("decay", DECAY),
    ]
)


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a kernel.

    Attributes:
        file: the source's name in this folder.
        kernel: the kernel with its template's values, as C++ writes it.
        grid: thread blocks (x, y, z).
        threads: of a thread block.
        arguments: (1,) of :data:`ARGUMENTS`.
    """

    file: str
    kernel: str
    grid: tuple[int, int, int]
    threads: int
    arguments: NDArray[np.void]


def on_device(launch: Launch, device: torch.device) -> None:
    """Run ``launch`` on torch's current stream of ``device``, without waiting for it."""
    import cupy

    stream = cupy.cuda.Stream.from_external(torch.cuda.current_stream(device))
    with cupy.cuda.Device(device.index), stream:
        _kernel(launch.file, launch.kernel)(launch.grid, (launch.threads, 1, 1), (launch.arguments,))


@functools.cache
def _kernel(file: str, kernel: str) -> Any:
    """The compiled kernel; CuPy compiles it once a device."""
    import cupy

    # CuPy's cache on disk does not see the headers: their digest makes a changed one a new module.
    options = (*OPTIONS, f"-DSOURCES_{digest()}")
    code = (SOURCES / file).read_text(encoding="utf-8")
    return cupy.RawModule(code=code, options=options, name_expressions=(kernel,)).get_function(kernel)


@functools.cache
def digest() -> str:
    """16 hexadecimal digits that change with any source in this folder."""
    total = hashlib.sha256()
    for path in sorted(SOURCES.glob("*.cu*")):
        total.update(path.name.encode() + b"\0" + path.read_bytes())
    return total.hexdigest()[:16]

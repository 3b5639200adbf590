"""Compiles this folder's kernels, and launches them on a CUDA device with CuPy, on memory that torch owns.

Every kernel takes one argument by value, the structure ``Arguments`` of ``frames.cuh``; :data:`ARGUMENTS` mirrors this
structure.  A kernel is compiled when it is first launched, and kept on disk in CuPy's cache.  This module calls NVRTC
itself and does not compile with ``cupy.RawModule``: CuPy 14 adds ``-ftz=true`` after all other options, and this option
flushes denormals to zero.
"""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

SOURCES: Final = Path(__file__).parent
# Bit equality with the reference: no fused multiply-add, IEEE division, denormals kept.
OPTIONS: Final = ("--fmad=false", "--prec-div=true", "--ftz=false", "-std=c++17")

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
_FLAGS: Final = ("exact", "divisor")
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
# The same bytes without fields, which is faster: CuPy asks NumPy to describe the fields at every launch.
BYTES: Final = np.dtype((np.void, ARGUMENTS.itemsize))


@dataclass(frozen=True, slots=True)
class Launch:
    """Describes one launch of a kernel: the kernel, its grid and its argument."""

    file: str  # name of the source in this folder
    kernel: str  # name of the kernel with its template arguments, as in C++
    grid: tuple[int, int, int]  # number of thread blocks (x, y, z)
    threads: int  # threads of a thread block
    arguments: NDArray[np.void]  # (1,) of type :data:`ARGUMENTS`


def on_device(launch: Launch, device: torch.device, *, idle_bytes: int = 0) -> None:
    """Run ``launch`` on torch's current stream of ``device``, without waiting for it to end.

    Each thread block reserves ``idle_bytes`` of shared memory that it does not use, so that fewer thread blocks
    run at once.
    """
    import cupy

    stream = cupy.cuda.Stream.from_external(torch.cuda.current_stream(device))
    with cupy.cuda.Device(device.index), stream:
        kernel = _kernel(launch.file, launch.kernel, device.index)
        if idle_bytes:
            kernel.max_dynamic_shared_size_bytes = idle_bytes  # required beyond 48 KiB
        kernel(launch.grid, (launch.threads, 1, 1), (launch.arguments.view(BYTES),), shared_mem=idle_bytes)


# SHA-256 of each loaded image, by file, kernel and device.
_LOADED: Final[dict[tuple[str, str, int], str]] = {}


def loaded_sha256() -> str:
    """Returns a single SHA-256 of all compiled kernels that this process has loaded, in hexadecimal digits."""
    return hashlib.sha256("".join(sorted(set(_LOADED.values()))).encode()).hexdigest()


@functools.cache
def _kernel(file: str, kernel: str, device: int) -> Any:
    """Returns a kernel that CuPy can launch, loaded on GPU number ``device``, which must be the current device.

    ``kernel`` is the kernel's name as in C++, and ``file`` the name of the source.  The kernel is compiled if CuPy's
    cache does not have it.
    """
    import cupy

    cache = Path(os.environ.get("CUPY_CACHE_DIR") or Path.home() / ".cupy" / "kernel_cache")
    path = cubin(file, kernel, int(cupy.cuda.Device(device).compute_capability), cache)
    _LOADED[file, kernel, device] = hashlib.sha256(path.read_bytes()).hexdigest()
    return cupy.RawModule(path=str(path)).get_function(path.suffixes[0][1:])


class Compiled(NamedTuple):
    """The compiled kernels of one file, and the compiler's log."""

    image: bytes  # a cubin, or, if NVRTC does not know the architecture yet, PTX, which the driver compiles
    lowered: dict[str, str]  # each kernel's name in the image, by its name in C++
    log: str


def compile_kernels(
    file: str,
    kernels: Sequence[str],
    architecture: int,
    sources: Path = SOURCES,
    *,
    options: Sequence[str] = (),
) -> Compiled:
    """Compile ``kernels`` of ``file``, named as in C++, for GPUs of type ``sm_<architecture>``.

    ``sources`` is the folder of ``file``, and ``options`` are given to NVRTC in addition to :data:`OPTIONS`.

    Raises RuntimeError: if this version of NVRTC no longer supports the architecture, or if the compiler fails.  The
    message of a failure has the compiler's log.
    """
    from cupy.cuda import nvrtc

    if architecture < (oldest := min(nvrtc.getSupportedArchs())):
        version = ".".join(map(str, nvrtc.getVersion()))
        raise RuntimeError(
            f"this GPU is sm_{architecture}, and NVRTC of CUDA {version} compiles for sm_{oldest} and later: install "
            "zeropp-bench[cuda12] in place of [cuda13], with a torch for CUDA 12"
        )
    program = nvrtc.createProgram((sources / file).read_text(encoding="utf-8"), file, (), ())
    try:
        for kernel in kernels:
            nvrtc.addNameExpression(program, kernel)
        newest = max(nvrtc.getSupportedArchs())
        known = architecture <= newest
        target = f"sm_{architecture}" if known else f"compute_{newest}"
        nvrtc.compileProgram(program, (*OPTIONS, f"-I{sources}", f"--gpu-architecture={target}", *options))
        # CuPy drops the last byte, as if the image were a string that ends with 0.
        image = nvrtc.getCUBIN(program) + b"\0" if known else nvrtc.getPTX(program)
        lowered = {kernel: nvrtc.getLoweredName(program, kernel) for kernel in kernels}
        return Compiled(image, lowered, nvrtc.getProgramLog(program))
    except nvrtc.NVRTCError as problem:
        raise RuntimeError(
            f"{file} does not compile for sm_{architecture}: {nvrtc.getProgramLog(program)}"
        ) from problem
    finally:
        nvrtc.destroyProgram(program)


@functools.cache
def digest() -> str:
    """Returns a hash of all CUDA sources in this folder and of :data:`OPTIONS`, as 16 hexadecimal digits."""
    total = hashlib.sha256(" ".join(OPTIONS).encode())
    for path in sorted(SOURCES.glob("*.cu*")):
        total.update(path.name.encode() + b"\0" + path.read_bytes())
    return total.hexdigest()[:16]


def cubin(file: str, kernel: str, architecture: int, folder: Path) -> Path:
    """Returns the path of the compiled kernel in ``folder``; compiles the kernel if the file is not there.

    Args:
        file: name of the source in this folder.
        kernel: name of the kernel with its template arguments, as in C++.
        architecture: the GPU's compute capability without a dot, such as 90.
        folder: where compiled kernels are kept.  If it cannot be written, the kernel is written to a temporary folder.

    Returns:
        The path of a file that is called ``KEY.LOWERED.cubin``.  KEY is a hash of the kernel, the sources and the
        compiler, and LOWERED is the kernel's name in the compiled image.

    Raises:
        RuntimeError: if the kernel does not compile (:func:`compile_kernels`).
    """
    from cupy.cuda import nvrtc

    compiler = ".".join(map(str, nvrtc.getVersion()))
    parts = (file, kernel, str(architecture), compiler, digest())
    key = "zeropp-" + hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    if path := next(folder.glob(f"{key}.*.cubin"), None):
        return path
    compiled = compile_kernels(file, [kernel], architecture)
    name = f"{key}.{compiled.lowered[kernel]}.cubin"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return _written(folder / name, compiled.image)
    except OSError:  # the folder is read-only or the disk is full, so this process uses a temporary folder
        return _written(Path(tempfile.mkdtemp(prefix="zeropp-")) / name, compiled.image)


def _written(path: Path, image: bytes) -> Path:
    """Write ``image`` to a temporary file, and rename the file to ``path``; other processes never see a part of the
    image.

    Returns ``path``.
    """
    aside = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")  # ranks may be threads of one process
    try:
        aside.write_bytes(image)
        return aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)

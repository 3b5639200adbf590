"""Compiling the kernels of this folder with NVRTC, through CuPy's binding of it.

Not through ``cupy.RawModule``, which compiles too: it adds ``-ftz=true`` after all options (CuPy 14,
``cupy.cuda.compiler``), and kernels that lose denormals are not the reference's.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

SOURCES: Final = Path(__file__).parent
# Bit equality with the reference: no fused multiply-add, IEEE division, denormals kept.
OPTIONS: Final = ("--fmad=false", "--prec-div=true", "--ftz=false", "-std=c++17")


@dataclass(frozen=True, slots=True)
class Compiled:
    """Kernels of one file.

    Attributes:
        image: the cubin; PTX, which the driver compiles, where NVRTC is older than the architecture.
        lowered: name in the image by the name as C++ writes it.
        log: of the compiler.
    """

    image: bytes
    lowered: dict[str, str]
    log: str


def compile_kernels(
    file: str,
    kernels: Sequence[str],
    architecture: int,
    sources: Path = SOURCES,
    *,
    options: Sequence[str] = (),
) -> Compiled:
    """Compile ``kernels``, as C++ writes them, ``decode<Fp32, 8>``; needs no GPU.

    Args:
        file: in ``sources``.
        kernels: to instantiate.
        architecture: 90 is ``sm_90``.
        sources: the folder, also of headers.
        options: beside :data:`OPTIONS`.

    Raises:
        RuntimeError: if the source does not compile.
    """
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram((sources / file).read_text(encoding="utf-8"), file, (), ())
    try:
        for kernel in kernels:
            nvrtc.addNameExpression(program, kernel)
        newest = max(nvrtc.getSupportedArchs())
        known = architecture <= newest
        target = f"sm_{architecture}" if known else f"compute_{newest}"
        nvrtc.compileProgram(program, (*OPTIONS, f"-I{sources}", f"--gpu-architecture={target}", *options))
        # CuPy takes the last byte off, as of a string.
        image = nvrtc.getCUBIN(program) + b"\0" if known else nvrtc.getPTX(program)
        lowered = {kernel: nvrtc.getLoweredName(program, kernel) for kernel in kernels}
        return Compiled(image, lowered, nvrtc.getProgramLog(program))
    except nvrtc.NVRTCError as problem:
        raise RuntimeError(f"{file} for sm_{architecture}: {nvrtc.getProgramLog(program)}") from problem
    finally:
        nvrtc.destroyProgram(program)


@functools.cache
def digest() -> str:
    """16 hexadecimal digits that change with any source in this folder, and with the options."""
    total = hashlib.sha256(" ".join(OPTIONS).encode())
    for path in sorted(SOURCES.glob("*.cu*")):
        total.update(path.name.encode() + b"\0" + path.read_bytes())
    return total.hexdigest()[:16]

"""Runs the C++ kernels, as a program, on tensors that end where the memory of the process ends.

Reading or writing one byte beyond a frame, a row or a carried error ends the process, and the bytes before them are
checked.  With a library built with ``-fsanitize=undefined``, undefined behaviour ends it too.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path

import torch
from torch import Tensor

from impl.codecs.codec import FORMATS, Codec, parse
from impl.codecs.reference import Carried
from impl.codecs.rounding_noise import Noise
from impl.cpu.kernels import Kernels

CODECS = (
    *[f"int{bits}:24" for bits in range(2, 9)],
    *["int5:7:asym", "int8:shard:stochastic", "int4:256:asym:stochastic", "int3:16:hadamard4"],
    *["fp8e4m3:40", "fp8e5m2:64:hadamard32:stochastic", "mxfp8", "mxfp8e5m2:stochastic", "mxfp4:hadamard16"],
    *FORMATS,
)
LENGTHS = (1, 7, 16, 33, 255, 2049, 4100)
KEPT: list[tuple[mmap.mmap, Tensor]] = []  # views do not keep their memory; bytes before each


def at_the_edge(numel: int, kind: torch.dtype) -> Tensor:
    """Returns zeros (numel,) that are followed by a page of memory that cannot be accessed."""
    size = numel * kind.itemsize
    whole = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, whole + mmap.PAGESIZE)
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    KEPT.append((memory, flat[: whole - size]))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(flat.data_ptr() + whole), mmap.PAGESIZE, 0) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")
    return flat[whole - size : whole].view(kind)


def run(kernels: Kernels, codec: Codec, numel: int, kind: torch.dtype) -> None:
    x, frame = at_the_edge(numel, kind), at_the_edge(codec.frame_bytes(numel), torch.uint8)
    x.copy_(torch.randn(numel))
    noise = Noise((1, 2, 3, 4), 8) if codec.stochastic else None
    kernels.encode(codec, x, frame, noise=noise)
    error = at_the_edge(numel, kind)
    kernels.encode(codec, x, frame, noise=noise, carried=Carried(error, 0.5))
    out, total = at_the_edge(numel, kind), at_the_edge(numel, torch.float32)
    kernels.decode(codec, frame, out)
    frames = frame.expand(3, -1)
    kernels.decode_sum(codec, frames, total)
    reencoded = at_the_edge(codec.frame_bytes(numel), torch.uint8)
    kernels.decode_sum_encode(codec, codec, frames, reencoded, numel, noise=noise, carried=Carried(error))


if __name__ == "__main__":
    built = Kernels(Path(sys.argv[1]))
    for text in CODECS:
        for index, length in enumerate(LENGTHS):
            run(built, parse(text), length, (torch.float32, torch.bfloat16, torch.float16)[index % 3])
        if any(bool(before.any()) for _, before in KEPT):
            raise AssertionError(f"{text} writes before the start of a row")
        KEPT.clear()
    print("nothing touched")

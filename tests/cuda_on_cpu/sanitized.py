"""Runs kernels under the address and undefined-behaviour sanitizers; a process of its own.

``python -m tests.cuda_on_cpu.sanitized FOLDER`` runs a covering set of the project's kernels;
``... FOLDER KERNEL`` runs one of ``planted.cu`` with 100 elements.  A finding ends the process.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import numpy as np
import torch

from impl.codec import IntCodec, parse
from impl.cuda.kernels import Kernels
from impl.cuda.launch import Launch
from tests.cuda_on_cpu import host

PLANTED = Path(__file__).parent / "planted.cu"
BUGS = ("one_too_many", "behind_shared", "shift_by_width")
VARIANTS = {
    "quantize.cu": [
        *("encode_held<Fp32, 0, 1>", "encode_held<Bf16, 4, 1>", "encode_held<Fp32, 8, 4>"),
        *(f"encode_{how}<Fp32>" for how in ("staged", "extents", "given")),
    ],
    "dequantize.cu": ["decode<Fp32, 0>", "decode<Fp16, 4>", "decode<Fp32, 8>", "decode_sum<0>"],
    "reduce.cu": ["decode_sum_encode<0, 4>"],
}


def healthy(folder: Path) -> None:
    """Every kernel, on buffers that end where the tensors end."""
    kernels = Kernels(host.Host(folder, sanitize=True, variants=VARIANTS))
    for text, numel in itertools.product(
        ["int5:8", "int3:7:asym", "int5:999", "int8:8200"], [1, 9, 1023, 16_401]
    ):
        codec = parse(text)
        x, frames = torch.randn(2, numel), torch.empty(2, codec.frame_bytes(numel), dtype=torch.uint8)
        if codec.bits == 8 and numel <= 8192:
            continue  # that variant is not built
        kernels.encode(codec, x, frames)
        kernels.decode(codec, frames, x)
    codec, odd = IntCodec(4, 16), IntCodec(3, 5, asymmetric=True)
    for numel in (1, 100, 257):
        half = torch.randn(3, numel).to(torch.bfloat16)
        frames = torch.empty(3, codec.frame_bytes(numel), dtype=torch.uint8)
        kernels.encode(codec, half, frames)
        kernels.decode(codec, frames, torch.empty(3, numel, dtype=torch.float16))
        kernels.encode(odd, half.float(), frames := torch.empty(3, odd.frame_bytes(numel), dtype=torch.uint8))
        kernels.decode_sum(odd, frames, torch.empty(numel))
        kernels.decode_sum_encode(
            odd, codec, frames, torch.empty(codec.frame_bytes(numel), dtype=torch.uint8), numel
        )


def planted(folder: Path, kernel: str) -> None:
    """One kernel with a bug."""
    library = host.load(host.build(PLANTED, BUGS, folder, sanitize=True))
    out = torch.zeros(256 if kernel != "one_too_many" else 100, dtype=torch.int32)
    arguments = np.array([0, out.data_ptr(), 100])
    host.call(library, Launch(PLANTED.name, kernel, (1, 1, 1), 256, arguments))


if __name__ == "__main__":
    if len(sys.argv) > 2:
        planted(Path(sys.argv[1]), sys.argv[2])
    else:
        healthy(Path(sys.argv[1]))
    print("clean")

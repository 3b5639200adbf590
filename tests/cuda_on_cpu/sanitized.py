"""Runs kernels under the address and undefined-behaviour sanitizers, in a process of its own.

``python -m tests.cuda_on_cpu.sanitized FOLDER`` runs every operation of codecs of all kinds on tensors that end
where their memory ends.  A finding ends the process.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import torch

from impl.codecs.codec import FORMATS, parse
from impl.codecs.reference import Carried
from impl.codecs.rounding_noise import Key
from impl.cuda.kernels import Kernels
from tests.cuda_on_cpu.host import Host

KINDS = {
    "int8:256:stochastic": torch.float32,
    "int4:16": torch.bfloat16,
    "int5:8:stochastic": torch.float32,
    "int3:7:asym": torch.float16,
    "int5:999": torch.float32,
    "int8:8200:stochastic": torch.float32,
    "int6:64:asym:hadamard64": torch.float32,
    "fp8e4m3:96": torch.float16,
    "mxfp4:hadamard32:stochastic": torch.bfloat16,
    **dict.fromkeys(FORMATS, torch.float32),
}
HOPS = ((parse("int4:16"), parse("int4:16")), (parse("int3:5:asym"), parse("mxfp8")))


def healthy(kernels: Kernels) -> None:
    for (text, kind), numel in itertools.product(KINDS.items(), (1, 9, 130, 1023, 8_209)):
        codec, x = parse(text), torch.randn(2, numel).to(kind)
        x[0, 0] = float("nan")
        frames = torch.empty(2, codec.frame_bytes(numel), dtype=torch.uint8)
        noise = Key(0, 0, 0, "unit", "weights").noise(0, (8,)) if codec.stochastic else None
        for carried in (None, Carried(torch.zeros(2, numel, dtype=torch.float16), 0.8)):
            kernels.encode(codec, x, frames, noise=noise, carried=carried)
        kernels.decode(codec, frames, x)
        kernels.decode_sum(codec, frames, torch.empty(numel))
    for (first, second), numel in itertools.product(HOPS, (1, 100, 257)):
        frames = torch.empty(3, first.frame_bytes(numel), dtype=torch.uint8)
        kernels.encode(first, torch.randn(3, numel).to(torch.bfloat16), frames)
        out = torch.empty(second.frame_bytes(numel), dtype=torch.uint8)
        kernels.decode_sum_encode(first, second, frames, out, numel)


if __name__ == "__main__":
    healthy(Kernels(Host(Path(sys.argv[1]), sanitize=True), spread=2))
    print("clean")

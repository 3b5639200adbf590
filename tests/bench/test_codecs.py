"""Encoding and decoding against ``copy_`` of the same input into an existing buffer, in one run.

``extra_info["of_copy"]`` is the ratio that counts: bytes of fp32 input per second, over copy's.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from impl import ops
from impl.codec import parse

pytestmark = pytest.mark.bench

NUMEL = 1 << 22


def _copy_seconds(x: torch.Tensor) -> float:
    """Best of 7, one thread."""
    target = torch.empty_like(x)
    best = float("inf")
    for _ in range(7):
        begin = time.perf_counter()
        target.copy_(x)
        best = min(best, time.perf_counter() - begin)
    return best


@pytest.mark.parametrize("text", ["bf16", "int8:2048", "int4:256", "int6:256", "int4:256:asym"])
@pytest.mark.parametrize("kernel", ["encode", "decode"])
def test_kernel(benchmark: Any, text: str, kernel: str) -> None:
    """One thread encodes or decodes 4 M elements."""
    torch.set_num_threads(1)
    codec = parse(text)
    x = torch.randn(NUMEL)
    frame = torch.zeros(codec.frame_bytes(NUMEL), dtype=torch.uint8)
    ops.encode(codec, x, frame)
    run = {"encode": lambda: ops.encode(codec, x, frame), "decode": lambda: ops.decode(codec, frame, x)}
    copy = _copy_seconds(x)
    benchmark(run[kernel])
    benchmark.extra_info["of_copy"] = round(copy / benchmark.stats.stats.min, 3)
    benchmark.extra_info["backend"] = ops.backend_of(x.device)

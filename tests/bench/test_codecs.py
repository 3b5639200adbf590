"""Encoding and decoding against ``copy_`` of the same input into an existing buffer, in one run.

``extra_info["of_copy"]`` is the ratio that counts.  Of an encoding or decoding it is seconds of a copy of
the elements over seconds of the operation; of a sum, and of an encoding with carried error, it is bytes
read and written a second, over the copy's.  One thread; 16 M elements, more than a core's own caches hold.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from impl import ops
from impl.codecs.codec import FORMATS, parse
from impl.codecs.reference import Carried
from impl.codecs.rounding_noise import Key

pytestmark = pytest.mark.bench

NUMEL = 1 << 24
SOURCES = 4
CODECS = (
    *("bf16", "int8:2048", "int8:256", "int4:256", "int6:256", "int4:256:asym", "int8:shard"),
    *("fp8e4m3:128", "fp8e5m2:128", "mxfp8", "mxfp4"),
    *("int8:256:stochastic", "int4:256:stochastic", "fp8e4m3:128:stochastic", "mxfp4:stochastic"),
    *FORMATS,
    *("int4:256:hadamard32", "int4:256:hadamard32:stochastic", "mxfp4:hadamard32"),
)
FED_BACK = ("int8:256", "int4:256", "int4:256:stochastic", "int4:256:hadamard32", "fp8e4m3:128", "mxfp4")
NOISE = Key(0, 0, 0, "unit", "gradients").noise()  # codecs that round to nearest ignore it
KINDS = (torch.float32, torch.bfloat16, torch.float16)


def _best(operation: Callable[[], object]) -> float:
    """Seconds of the fastest of 7."""
    best = float("inf")
    for _ in range(7):
        begin = time.perf_counter()
        operation()
        best = min(best, time.perf_counter() - begin)
    return best


def _report(
    benchmark: BenchmarkFixture, operation: Callable[[], object], x: torch.Tensor, work: float
) -> None:
    """Time ``operation``, which does ``work`` times the work of a copy of ``x``, between two copies."""
    target = torch.empty_like(x)
    copy = _best(lambda: target.copy_(x))
    benchmark.pedantic(operation, rounds=7, warmup_rounds=1)
    took = _best(operation)
    copy = min(copy, _best(lambda: target.copy_(x)))
    benchmark.extra_info.update(
        of_copy=round(work * copy / took, 3),
        copy_gigabytes_per_second=round(x.nbytes / copy / 1e9, 2),
        backend=ops.backend_of(x.device),
    )


@pytest.mark.parametrize("text", CODECS)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("kernel", ["encode", "decode"])
def test_kernel(benchmark: BenchmarkFixture, text: str, kernel: str, kind: torch.dtype) -> None:
    """One thread encodes or decodes a shard."""
    torch.set_num_threads(1)
    codec, x = parse(text), torch.randn(NUMEL).to(kind)
    frame, out = torch.zeros(codec.frame_bytes(NUMEL), dtype=torch.uint8), torch.empty_like(x)
    ops.encode(codec, x, frame, noise=NOISE)
    run = {
        "encode": lambda: ops.encode(codec, x, frame, noise=NOISE),
        "decode": lambda: ops.decode(codec, frame, out),
    }
    _report(benchmark, run[kernel], x, work=1.0)


@pytest.mark.parametrize("text", CODECS)
@pytest.mark.parametrize("kernel", ["decode_sum", "decode_sum_encode"])
def test_sum(benchmark: BenchmarkFixture, text: str, kernel: str) -> None:
    """One thread sums four frames, to fp32 or to a frame."""
    torch.set_num_threads(1)
    codec, x = parse(text), torch.randn(NUMEL)
    frames = torch.zeros(SOURCES, codec.frame_bytes(NUMEL), dtype=torch.uint8)
    for frame in frames:
        ops.encode(codec, x, frame, noise=NOISE)
    out, again = torch.empty_like(x), torch.empty_like(frames[0])
    run = {
        "decode_sum": lambda: ops.decode_sum(codec, frames, out),
        "decode_sum_encode": lambda: ops.decode_sum_encode(codec, codec, frames, again, NUMEL, noise=NOISE),
    }
    written = {"decode_sum": out, "decode_sum_encode": again}[kernel]
    _report(benchmark, run[kernel], x, work=(frames.nbytes + written.nbytes) / (2 * x.nbytes))


@pytest.mark.parametrize("text", FED_BACK)
@pytest.mark.parametrize("state", KINDS, ids=str)
def test_error_feedback(benchmark: BenchmarkFixture, text: str, state: torch.dtype) -> None:
    """One thread encodes fp32 and carries what it left over."""
    torch.set_num_threads(1)
    codec, x = parse(text), torch.randn(NUMEL)
    frame, error = torch.zeros(codec.frame_bytes(NUMEL), dtype=torch.uint8), torch.zeros(NUMEL).to(state)
    moved = x.nbytes + 2 * error.nbytes + frame.nbytes
    _report(
        benchmark,
        lambda: ops.encode(codec, x, frame, noise=NOISE, carried=Carried(error)),
        x,
        work=moved / (2 * x.nbytes),
    )

"""GB/s of the CUDA kernels against a device copy in the same run: ``pytest tests/bench -m gpu``.

A figure counts every byte read and written once.  ``extra_info`` holds the median of device times (by
events), GB/s, and the ratio to the copy, which reads and writes 256 MiB.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from impl.codec import parse
from impl.cuda import kernels

pytestmark = pytest.mark.gpu

SIZE = 256 << 20  # bytes of elements
SOURCES = 8
CODECS = (
    "int8:2048",
    "int8:256",
    "int4:256",
    "int4:2048",
    "int6:256",
    "int4:256:asym",
    "int8:100",
    "int8:shard",
)


@pytest.fixture(autouse=True)
def needs_a_device() -> None:
    """Skip where there is none."""
    if not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")
    pytest.importorskip("cupy", reason="CuPy, which compiles the kernels, is not installed")


def seconds(operation: Callable[[], object]) -> float:
    """Median device time of one operation, after warming up; launches queue ahead of the device."""
    for _ in range(5):
        operation()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(31)]
    for mark in marks:
        mark.record()
        operation()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks))


def report(benchmark: BenchmarkFixture, operation: Callable[[], object], moved: int) -> None:
    """Write GB/s of ``moved`` bytes, and its ratio to a copy's."""
    source = torch.empty(SIZE, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = 2 * SIZE / seconds(lambda: target.copy_(source))
    took = seconds(operation)
    benchmark.extra_info.update(
        seconds=took,
        gigabytes_per_second=moved / took / 1e9,
        copy_gigabytes_per_second=copy / 1e9,
        ratio_to_copy=moved / took / copy,
        device=torch.cuda.get_device_name(),
    )
    benchmark.pedantic(lambda: (operation(), torch.cuda.synchronize()), rounds=10, warmup_rounds=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("text", CODECS)
def test_encode(benchmark: BenchmarkFixture, text: str, dtype: torch.dtype) -> None:
    """Elements to frames."""
    codec, x = parse(text), torch.randn(SIZE // dtype.itemsize, device="cuda", dtype=dtype)
    frames = torch.empty(codec.frame_bytes(x.numel()), dtype=torch.uint8, device="cuda")
    report(benchmark, lambda: kernels.encode(codec, x, frames), SIZE + frames.numel())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("text", CODECS)
def test_decode(benchmark: BenchmarkFixture, text: str, dtype: torch.dtype) -> None:
    """Frames to elements."""
    codec, out = parse(text), torch.empty(SIZE // dtype.itemsize, device="cuda", dtype=dtype)
    frames = torch.empty(codec.frame_bytes(out.numel()), dtype=torch.uint8, device="cuda")
    kernels.encode(codec, torch.randn_like(out), frames)
    report(benchmark, lambda: kernels.decode(codec, frames, out), SIZE + frames.numel())


@pytest.mark.parametrize("text", ["int8:256", "int4:256", "int8:2048"])
def test_decode_sum(benchmark: BenchmarkFixture, text: str) -> None:
    """Frames of eight sources to their sum."""
    codec, out = parse(text), torch.empty(SIZE // 4, device="cuda")
    frames = torch.empty(SOURCES, codec.frame_bytes(out.numel()), dtype=torch.uint8, device="cuda")
    kernels.encode(codec, torch.randn(SIZE // 4, device="cuda").expand(SOURCES, -1), frames)
    report(benchmark, lambda: kernels.decode_sum(codec, frames, out), SIZE + frames.numel())


@pytest.mark.parametrize(
    ("first", "second"), [("int4:256", "int4:256"), ("int8:256", "int4:256"), ("int8:2048",) * 2]
)
def test_decode_sum_encode(benchmark: BenchmarkFixture, first: str, second: str) -> None:
    """Frames of eight sources to the frame of their sum."""
    numel, before, after = SIZE // 4, parse(first), parse(second)
    frames = torch.empty(SOURCES, before.frame_bytes(numel), dtype=torch.uint8, device="cuda")
    kernels.encode(before, torch.randn(numel, device="cuda").expand(SOURCES, -1), frames)
    out = torch.empty(after.frame_bytes(numel), dtype=torch.uint8, device="cuda")
    moved = frames.numel() + out.numel()
    report(benchmark, lambda: kernels.decode_sum_encode(before, after, frames, out, numel), moved)

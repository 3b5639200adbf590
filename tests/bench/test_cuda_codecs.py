"""GB/s of the CUDA kernels against a device copy in the same run.

``pytest tests/bench/test_cuda_codecs.py -m gpu -n 0 -s`` needs no network, and prints a line a case.  A
figure counts every byte that an operation has to read and write once.  ``extra_info`` holds the median of
device times (by events), GB/s, and the ratio to the copy, which reads and writes 256 MiB.  Goals, for
blocks of 256 and 2,048: 0.93 of a copy to quantise and to dequantise, 0.88 with Philox, 0.90 to sum and
quantise again.  The first tests hold results at this size against the reference's, on the device.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from impl.codecs import reference
from impl.codecs.codec import Codec, parse
from impl.codecs.reference import Carried
from impl.codecs.rounding_noise import Key, Noise
from impl.cuda.kernels import Kernels
from impl.cuda.launch import on_device

pytestmark = [pytest.mark.gpu, pytest.mark.needs("CuPy")]

kernels = Kernels(on_device)
SIZE = 256 << 20  # bytes of elements
SOURCES = 8
KEY = Key(0, 0, 0, "unit", "gradients")
CODECS = (
    *("int8:2048", "int8:256", "int4:256", "int4:2048", "int8:256:stochastic", "int4:256:stochastic"),
    *("int4:256:asym", "int6:256", "int8:100", "int8:shard", "int4:256:hadamard32"),
    *("fp8e4m3:128", "mxfp8", "mxfp4", "mxfp4:stochastic"),
)
HOPS = [
    *(("int4:256", "int4:256"), ("int8:256", "int4:256"), ("int8:2048", "int8:2048")),
    *(("int4:256", "int4:256:stochastic"), ("mxfp8", "mxfp4"), ("int4:256:hadamard32", "int8:256")),
]


def noise_of(codec: Codec) -> Noise | None:
    """The random bits of one row."""
    return KEY.noise() if codec.stochastic else None


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
    print(f"{benchmark.name}: {moved / took / 1e9:.0f} GB/s, {moved / took / copy:.3f} of a copy")
    benchmark.pedantic(lambda: (operation(), torch.cuda.synchronize()), rounds=10, warmup_rounds=2)


@pytest.mark.parametrize("text", CODECS)
def test_large_results_are_the_references(text: str) -> None:
    """At a size whose thread blocks loop, frames, elements and sums equal the reference's on the device."""
    codec, numel = parse(text), (16 << 20) + 24
    x = torch.randn(2, numel, device="cuda").to(torch.bfloat16)
    wanted, got = (
        torch.empty(2, codec.frame_bytes(numel), dtype=torch.uint8, device="cuda") for _ in range(2)
    )
    noise = KEY.noise(0, (numel,)) if codec.stochastic else None
    reference.encode(codec, x, wanted, noise=noise)
    kernels.encode(codec, x, got, noise=noise)
    assert torch.equal(got, wanted)
    here, there = (torch.empty(numel, device="cuda") for _ in range(2))
    reference.decode_sum(codec, wanted, here)
    kernels.decode_sum(codec, got, there)
    assert torch.equal(there, here)
    reference.decode(codec, wanted[0], here)
    kernels.decode(codec, got[0], there)
    assert torch.equal(there, here)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("text", CODECS)
def test_encode(benchmark: BenchmarkFixture, text: str, dtype: torch.dtype) -> None:
    """Elements to frames."""
    codec, x = parse(text), torch.randn(SIZE // dtype.itemsize, device="cuda", dtype=dtype)
    frames = torch.empty(codec.frame_bytes(x.numel()), dtype=torch.uint8, device="cuda")
    noise = noise_of(codec)
    report(benchmark, lambda: kernels.encode(codec, x, frames, noise=noise), SIZE + frames.numel())


@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("text", ["int4:256", "int8:2048", "int4:256:stochastic", "mxfp4", "int8:shard"])
def test_encode_with_carried_error(benchmark: BenchmarkFixture, text: str, state: torch.dtype) -> None:
    """bf16 elements and their carried error to frames and what they leave over."""
    codec, x = parse(text), torch.randn(SIZE // 2, device="cuda", dtype=torch.bfloat16)
    frames = torch.empty(codec.frame_bytes(x.numel()), dtype=torch.uint8, device="cuda")
    carried, noise = Carried(torch.zeros(x.numel(), dtype=state, device="cuda"), 0.8), noise_of(codec)
    moved = SIZE + frames.numel() + 2 * x.numel() * state.itemsize
    report(benchmark, lambda: kernels.encode(codec, x, frames, noise=noise, carried=carried), moved)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("text", CODECS)
def test_decode(benchmark: BenchmarkFixture, text: str, dtype: torch.dtype) -> None:
    """Frames to elements."""
    codec, out = parse(text), torch.empty(SIZE // dtype.itemsize, device="cuda", dtype=dtype)
    frames = torch.empty(codec.frame_bytes(out.numel()), dtype=torch.uint8, device="cuda")
    kernels.encode(codec, torch.randn_like(out), frames, noise=noise_of(codec))
    report(benchmark, lambda: kernels.decode(codec, frames, out), SIZE + frames.numel())


@pytest.mark.parametrize("text", ["int8:256", "int4:256", "int8:2048", "mxfp4", "int4:256:hadamard32"])
def test_decode_sum(benchmark: BenchmarkFixture, text: str) -> None:
    """Frames of eight sources to their sum."""
    codec, out = parse(text), torch.empty(SIZE // 4, device="cuda")
    frames = torch.empty(SOURCES, codec.frame_bytes(out.numel()), dtype=torch.uint8, device="cuda")
    kernels.encode(codec, torch.randn(SIZE // 4, device="cuda").expand(SOURCES, -1), frames)
    report(benchmark, lambda: kernels.decode_sum(codec, frames, out), SIZE + frames.numel())


@pytest.mark.parametrize(("first", "second"), HOPS)
def test_decode_sum_encode(benchmark: BenchmarkFixture, first: str, second: str) -> None:
    """Frames of eight sources to the frame of their sum."""
    numel, before, after = SIZE // 4, parse(first), parse(second)
    frames = torch.empty(SOURCES, before.frame_bytes(numel), dtype=torch.uint8, device="cuda")
    kernels.encode(before, torch.randn(numel, device="cuda").expand(SOURCES, -1), frames)
    out = torch.empty(after.frame_bytes(numel), dtype=torch.uint8, device="cuda")
    moved, noise = frames.numel() + out.numel(), noise_of(after)
    report(
        benchmark,
        lambda: kernels.decode_sum_encode(before, after, frames, out, numel, noise=noise),
        moved,
    )

"""GB/s of the CUDA kernels against a device copy in the same run.

``pytest tests/bench/test_cuda_codecs.py -m gpu -n 0 -s`` needs no network, and prints a line a case.  A
figure counts every byte that an operation has to read and write once.  ``extra_info`` holds GB/s, and the
ratio to the copy, which reads and writes 256 MiB.  Goals, for blocks of 256 and 2,048: 0.93 of a copy to
quantise and to dequantise, 0.88 with Philox, 0.90 to sum and quantise again.  The first tests hold results at
this size against the reference's, on the device.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from impl.codecs import reference
from impl.codecs.codec import Dtype, parse
from impl.codecs.reference import DTYPES
from impl.codecs.rounding_noise import Key
from impl.cuda.kernels import Kernels
from impl.cuda.launch import on_device
from tests.gpu_first import rates

pytestmark = [pytest.mark.gpu, pytest.mark.needs("CuPy")]

kernels = Kernels(on_device)
MEBIBYTES = 256  # of elements
KEY = Key(0, 0, 0, "unit", "gradients")
CODECS = (
    *("int8:2048", "int8:256", "int4:256", "int4:2048", "int8:256:stochastic", "int4:256:stochastic"),
    *("int4:256:asym", "int6:256", "int8:100", "int8:shard", "int4:256:hadamard32"),
    *("fp8e4m3:128", "mxfp8", "mxfp4", "mxfp4:stochastic"),
)


@pytest.mark.parametrize("text", CODECS)
def test_large_results_are_the_references(text: str) -> None:
    """Where thread blocks loop, frames, elements and sums equal the reference's on the device."""
    codec, numel = parse(text), (16 << 20) + 24
    x = torch.randn(2, numel, device="cuda").to(torch.bfloat16)
    wanted, got = (
        torch.empty(2, codec.frame_bytes(numel), dtype=torch.uint8, device="cuda") for _ in range(2)
    )
    noise = KEY.noise(0, (numel,)) if codec.stochastic else None
    reference.encode(codec, x, wanted, noise=noise)
    kernels.encode(codec, x, got, noise=noise)
    assert torch.equal(got, wanted)
    expected, actual = (torch.empty(numel, device="cuda") for _ in range(2))
    reference.decode_sum(codec, wanted, expected)
    kernels.decode_sum(codec, got, actual)
    assert torch.equal(actual, expected)
    reference.decode(codec, wanted[0], expected)
    kernels.decode(codec, got[0], actual)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("text", CODECS)
def test_rates(benchmark: BenchmarkFixture, text: str, kind: Dtype) -> None:
    """All operations of a codec, and those that sum its frames and encode the sum."""
    measured: dict[str, Any] = {"device": torch.cuda.get_device_name()}
    measure = partial(rates, text, kind, MEBIBYTES, torch.device("cuda"), 0.02)
    benchmark.pedantic(lambda: measured.update(measure()), rounds=1, iterations=1)
    benchmark.extra_info.update(measured)
    print(f"{benchmark.name}: {measured}")

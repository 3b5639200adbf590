"""What CuPy needs in Python for a launch's argument, until it asks the driver; no GPU is needed, or used."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from impl.codecs.codec import parse
from impl.cuda.kernels import Kernels
from impl.cuda.launch import ARGUMENTS, BYTES

pytestmark = [pytest.mark.bench, pytest.mark.needs("CuPy"), pytest.mark.needs("no CUDA device")]


@pytest.mark.parametrize("fields", [True, False], ids=["structure", "bytes"])
def test_an_argument_is_described(benchmark: BenchmarkFixture, fields: bool) -> None:
    """As the structure that kernels take, and as its bytes, which launches hand over."""
    from cupy.cuda import function

    launch = function.Function.__new__(function.Function)  # of no kernel
    arguments = np.zeros(1, ARGUMENTS)
    stream = SimpleNamespace(ptr=0)

    def argue(one: Any) -> str:
        try:
            launch((1, 1, 1), (1, 1, 1), (one,), 0, stream)
        except RuntimeError as error:  # of the driver: the argument was taken
            return str(error)
        return ""

    said = benchmark(lambda: argue(arguments if fields else arguments.view(BYTES)))
    assert "cuda" in said


@pytest.mark.parametrize("repeats", [True, False], ids=["repeated", "anew"])
def test_a_launch_is_laid_out(benchmark: BenchmarkFixture, repeats: bool) -> None:
    """All of our Python before CuPy's: of a decoding that was done before, and of one that was not."""
    kernels, codec, out = Kernels(lambda *_: None), parse("int8:256"), torch.empty(1 << 16)
    frames = torch.zeros(codec.frame_bytes(out.numel()), dtype=torch.uint8)

    def decode() -> None:
        if not repeats:
            kernels._seen.clear()
        kernels.decode(codec, frames, out)

    benchmark(decode)
    assert len(kernels._seen) == 1

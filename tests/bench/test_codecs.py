"""Every operation of our CPU codecs, and of the reference, beside a copy of the same elements.

A group has one operation.  ``extra_info`` holds the bytes that a call reads and writes once, from which a page
computes GB/s, and ``reference`` marks the copy.  The reference backend has fewer elements, because it is slow.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor

from harness.bench.codecs import works

pytestmark = pytest.mark.bench

MEBIBYTES: Final = 64  # of fp32 elements, more than a processor's caches hold
OPERATIONS: Final = ("encode", "decode", "decode_sum", "decode_sum_encode", "encode_carried")
CODECS: Final = (
    "bf16", "int8:2048", "int4:256", "int6:256", "int4:256:asym", "fp8e4m3:128", "mxfp4", "int4:128:hadamard32",
    "int4:256:stochastic",
)  # fmt: skip
CASES: Final = (*((text, "cpu") for text in CODECS), ("int8:2048", "reference"), ("int4:256", "reference"))
ROUNDS: Final = 7


@pytest.fixture(scope="module")
def elements() -> Tensor:
    """(S,) fp32 elements of a normal distribution."""
    torch.set_num_threads(1)
    return torch.randn(MEBIBYTES << 18, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_copy(benchmark: BenchmarkFixture, elements: Tensor, operation: str) -> None:
    """The copy into an existing buffer, with which each group's codecs are compared."""
    target = torch.empty_like(elements)
    benchmark.group = f"codecs: {operation}"
    benchmark.extra_info.update(moved_bytes=2 * elements.nbytes, elements=elements.numel(), reference=True)
    benchmark.pedantic(partial(target.copy_, elements), rounds=ROUNDS, warmup_rounds=1)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(("text", "backend"), CASES)
def test_codec(
    benchmark: BenchmarkFixture, elements: Tensor, text: str, operation: str, backend: str
) -> None:
    """One operation of a codec, into existing buffers."""
    cases = {work.names["operation"]: work for work in works(elements, [text], [backend])}
    if operation not in cases:
        pytest.skip(f"{text} has no operation {operation}")
    work = cases[operation]
    benchmark.group = f"codecs: {operation}"
    benchmark.extra_info.update(moved_bytes=work.moved_bytes, elements=work.x.numel())
    benchmark.pedantic(work.run, rounds=ROUNDS, warmup_rounds=1)

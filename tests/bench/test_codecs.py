"""Encoding, decoding and summing against ``copy_`` of the same elements, as ``zeropp bench codecs`` times it.

``extra_info`` holds, by operation, the bytes that it reads and writes a second over those of a copy: medians
of pairs in one run, on one thread and 64 MiB of elements, more than a core's own caches hold.
"""

from __future__ import annotations

import statistics
from functools import partial

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from harness.bench.codecs import measure
from harness.cluster.rank import Rank
from harness.records.bench_record import ElementType, Sample
from impl.codecs.codec import FORMATS

pytestmark = pytest.mark.bench

CODECS = (
    *("bf16", "int8:2048", "int8:256", "int4:256", "int6:256", "int4:256:asym", "int8:shard"),
    *("fp8e4m3:128", "fp8e5m2:128", "mxfp8", "mxfp4"),
    *("int8:256:stochastic", "int4:256:stochastic", "fp8e4m3:128:stochastic", "mxfp4:stochastic"),
    *FORMATS,
    *("int4:256:hadamard32", "int4:256:hadamard32:stochastic", "mxfp4:hadamard32"),
)


@pytest.mark.parametrize("text", CODECS)
@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp16"])
def test_codec(benchmark: BenchmarkFixture, text: str, kind: ElementType) -> None:
    """All operations of one codec take turns; sums are of fp32 alone."""
    rank = Rank(0, None, None, None, lambda _: None, 1)  # type: ignore[arg-type]
    found: list[Sample] = []
    run = partial(measure, rank, codecs=[text], backends=["cpu"], kinds=[kind], mebibytes=64, seconds=0.5)
    benchmark.pedantic(lambda: found.extend(run()), rounds=1, iterations=1)
    for sample in found:
        pairs = zip(sample.reference_seconds, sample.seconds, strict=True)
        work = sample.sizes["moved_bytes"] / (2 * sample.sizes["element_bytes"])
        benchmark.extra_info[str(sample.names["operation"])] = round(
            work * statistics.median(copy / took for copy, took in pairs), 3
        )

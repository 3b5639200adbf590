"""What sampling the machine costs computation beside it, in interleaved pairs with and without it.

``extra_info`` has the ratios of seconds and of processor seconds, sampled over not, each with its 95 %
interval; below 1.01 at its upper end is what a trial's record promises.  One thread, 1.6 s a run.
"""

from __future__ import annotations

import time

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from harness.measure import telemetry
from harness.records.confidence_intervals import paired_ratio_interval

pytestmark = pytest.mark.bench

PAIRS = 36
SECONDS = 1.6


def _work(turns: int) -> None:
    left = right = torch.full((512, 512), 1e-3)
    for _ in range(turns):
        left = (left @ right).tanh_()


def _took(turns: int, *, sampled: bool) -> tuple[float, float]:
    """Seconds and processor seconds of the process."""
    wall, processors = time.perf_counter(), time.process_time()
    if sampled:
        with telemetry.sampling(0, [], None):
            _work(turns)
    else:
        _work(turns)
    return time.perf_counter() - wall, time.process_time() - processors


def test_sampling(benchmark: BenchmarkFixture) -> None:
    """By turns, each first in half of the pairs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        _work(100)
        turns = round(SECONDS / _took(100, sampled=False)[0] * 100)
        found: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        for number in range(PAIRS):
            for sampled in (number % 2 == 0, number % 2 == 1):
                found[sampled].append(_took(turns, sampled=sampled))
        for name, column in (("seconds", 0), ("processor_seconds", 1)):
            with_it, without = (
                {(0, number): one[column] for number, one in enumerate(found[sampled])}
                for sampled in (True, False)
            )
            ratio = paired_ratio_interval(with_it, without)
            benchmark.extra_info[name] = f"{ratio.estimate:.4f} [{ratio.low:.4f}, {ratio.high:.4f}]"
        benchmark.pedantic(_work, args=(turns,), rounds=1)
    finally:
        torch.set_num_threads(threads)

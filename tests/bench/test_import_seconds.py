"""Seconds until a program can call zeropp, beside the import of torch."""

from __future__ import annotations

import subprocess
import sys
from typing import Final

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from harness.measure import machine

pytestmark = pytest.mark.bench

ROUNDS: Final = 10
PROGRAMS: Final = {
    "torch": "import torch",
    "zeropp": "import zeropp",
    "zeropp.shard": "import zeropp; zeropp.shard",
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_seconds_of_an_import(benchmark: BenchmarkFixture, program: str) -> None:
    """A new interpreter each time; the import of torch is the reference, of which the page states the ratio."""
    benchmark.group = "import: a program that trains"
    if program == "torch":
        benchmark.extra_info["reference"] = True

    def call() -> None:
        command = [sys.executable, "-c", PROGRAMS[program]]
        subprocess.run(command, check=True, capture_output=True, cwd=machine.ROOT)

    benchmark.pedantic(call, rounds=ROUNDS, warmup_rounds=1)

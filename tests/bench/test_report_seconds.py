"""Seconds of plans, reruns and pages, beside the import of pandas and pyplot."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from harness.measure import machine
from harness.records import archive, chained_journal
from harness.records.trial_record import read_all
from harness.workloads import corpus

pytestmark = pytest.mark.bench

SUITE: Final = "suites/quickstart.toml"
REFERENCE: Final = machine.ROOT / "results" / "reference"
IMPORTS: Final = "import pandas, matplotlib.pyplot"
COMMAND: Final = "import sys; from harness.cli import main; sys.exit(main())"
ROUNDS: Final = 3


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of results in which this code has run all 42 trials of quickstart, by its committed records."""
    packed = archive.unpack(REFERENCE / "quickstart.tar.xz", tmp_path_factory.mktemp("packed"))
    results = tmp_path_factory.mktemp("results")
    code, facts = machine.code(), machine.facts()
    here = {"code": code, "machine": facts, "pool": machine.pool_key(facts, code)}
    text = corpus.load("stdlib").sha256  # the sources of the Python that runs this
    for record in read_all(packed):
        if record.sweep == 0:
            inputs = {"inputs": record.inputs | {"corpus": text}}
            chained_journal.append(results / "quickstart", record.model_copy(update=here | inputs))
    return results


@pytest.mark.parametrize("command", ["import", "plan", "run", "report"])
def test_seconds_of_a_command(benchmark: BenchmarkFixture, finished: Path, command: str) -> None:
    """A plan of quickstart, its run where all trials are on record and drawn, and its page; the reference is the
    import of pandas and pyplot.
    """
    zeropp = ["-c", COMMAND]
    arguments = {
        "import": ["-c", IMPORTS],
        "plan": [*zeropp, "plan", SUITE],
        "run": [*zeropp, "run", SUITE, "--results", str(finished)],
        "report": [*zeropp, "report", str(finished / "quickstart")],
    }[command]
    benchmark.group = "commands: quickstart, 42 records"
    if command == "import":
        benchmark.extra_info["reference"] = True

    def call() -> None:
        subprocess.run([sys.executable, *arguments], check=True, capture_output=True, cwd=machine.ROOT)

    benchmark.pedantic(call, rounds=ROUNDS, warmup_rounds=1)

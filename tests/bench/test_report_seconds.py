"""Processor seconds of plans, reruns and pages, as multiples of the import of pandas and pyplot."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from harness.measure import machine
from harness.records import archive, chained_journal
from harness.records.trial_record import read_all

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
    for record in read_all(packed):
        if record.sweep == 0:
            chained_journal.append(results / "quickstart", record.model_copy(update=here))
    return results


def seconds(*arguments: str) -> float:
    """Processor seconds of Python with these arguments, and of its processes: the least of a few rounds."""
    found = []
    for _ in range(ROUNDS):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *arguments], check=True, capture_output=True, cwd=machine.ROOT)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(found)


@pytest.mark.parametrize("command", ["plan", "run", "report"])
def test_seconds_of_a_command(benchmark: Any, finished: Path, command: str) -> None:
    """A plan of quickstart, its run where all trials are on record and drawn, and its page."""
    arguments = {
        "plan": ["plan", SUITE],
        "run": ["run", SUITE, "--results", str(finished)],
        "report": ["report", str(finished / "quickstart")],
    }[command]
    subprocess.run(
        [sys.executable, "-c", COMMAND, *arguments], check=True, capture_output=True, cwd=machine.ROOT
    )
    measured: dict[str, float] = {}

    def both() -> None:
        measured.update(imports=seconds("-c", IMPORTS), command=seconds("-c", COMMAND, *arguments))

    benchmark.pedantic(both, rounds=1, iterations=1)
    benchmark.extra_info["times_the_imports"] = round(measured["command"] / measured["imports"], 2)

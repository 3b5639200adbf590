"""The number of the harness's files through which a trial passes in the sweep's process, up to its record.

The first entry into every function of the harness counts, in order; consecutive entries into one file are a
stay.  A stay in a file that was left before is a return.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from rich.console import Console

from harness.runs import sweep
from harness.runs.further_repeats import Batch
from harness.suites.suite_file import load

HARNESS = Path(sweep.__file__).resolve().parents[1]
MOST_STAYS = 20
MOST_RETURNS = 6
SUITE = """
name = "path"
question = "Which way does a trial go?"
[defaults]
model.name = "gpt-tiny"
steps = 2
warmup = 1
validate_every = 0
cluster = { nodes = 2, ranks_per_node = 1, rate = "1 Gbit/s" }
[matrix]
strategy = ["zero3"]
"""


def entered(folder: Path) -> list[str]:
    """The files of functions that are first entered while a trial runs, in order."""
    seen: set[CodeType] = set()
    files: list[str] = []
    inside = 0

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal inside
        code = frame.f_code
        if code.co_name == "run" and code.co_filename == sweep.__file__:  # returns the record of one trial
            inside += {"call": 1, "return": -1}.get(event, 0)
        file = Path(code.co_filename)
        if event != "call" or not inside or code in seen or not file.is_relative_to(HARNESS):
            return
        seen.add(code)
        files.append(file.relative_to(HARNESS).as_posix())

    (folder / "path.toml").write_text(SUITE, encoding="utf-8")
    suite = load(folder / "path.toml")
    sys.setprofile(note)
    try:
        batches = [Batch(0, suite.trials)]
        outcome = sweep.run_sweep(suite, batches, folder / "path", Console(stderr=True))
    finally:
        sys.setprofile(None)
    assert outcome.ok == 1
    return files


@pytest.mark.long
@pytest.mark.needs("namespaces")
def test_a_trial_goes_one_way(tmp_path: Path) -> None:
    """From the sweep to its record it passes through few files, and returns to few."""
    stays = [file for file, _ in itertools.groupby(entered(tmp_path))]
    assert stays[0] == "runs/sweep.py"
    assert "runs/trial_on_cluster.py" in stays
    assert len(stays) <= MOST_STAYS, stays
    assert len(stays) - len(set(stays)) <= MOST_RETURNS, stays

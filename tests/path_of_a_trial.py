"""``python -m tests.path_of_a_trial``: the files that a trial passes through, from the sweep to its record.

Of every function of the harness that the sweep's process enters meanwhile, the first entry counts, in order;
entries of one file in a row are a stay.  A stay in a file that was left before is a return.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

from rich.console import Console

from harness.runs import sweep
from harness.suites.suite_file import load

HARNESS: Final = Path(sweep.__file__).resolve().parents[1]
BEGIN: Final = "run"  # the method of a sweep that returns the record of one trial
SUITE: Final = """
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


def stays(files: Sequence[str]) -> list[str]:
    """The files of entries, once for entries in a row."""
    return [file for file, _ in itertools.groupby(files)]


def path_of_a_trial() -> list[str]:
    """The files of the harness whose functions are entered for the first time, in order."""
    seen: set[CodeType] = set()
    files: list[str] = []
    inside = 0

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal inside
        code = frame.f_code
        if code.co_name == BEGIN and code.co_filename == sweep.__file__:
            inside += {"call": 1, "return": -1}.get(event, 0)
        file = Path(code.co_filename)
        if event != "call" or not inside or code in seen or not file.is_relative_to(HARNESS):
            return
        seen.add(code)
        files.append(file.relative_to(HARNESS).as_posix())

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "path.toml")
        path.write_text(SUITE, encoding="utf-8")
        suite = load(path)
        sys.setprofile(note)
        try:
            outcome = sweep.run_sweep(suite, suite.trials, Path(folder, "path"), Console(stderr=True))
        finally:
            sys.setprofile(None)
        if outcome.ok != 1:
            raise RuntimeError(f"the trial did not run: {outcome}")
    return files


if __name__ == "__main__":
    found = stays(path_of_a_trial())
    for number, file in enumerate(found, 1):
        print(f"{number:3} {file}{' (a return)' if file in found[: number - 1] else ''}")
    print(f"{len(found)} stays, {len(found) - len(set(found))} returns")

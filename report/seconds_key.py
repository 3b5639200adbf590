"""Finds the records of the suite that another suite's key ``seconds`` names.  Imports no pandas.

A suite takes the seconds of a step from these records, to compute net speed-ups.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from harness.records import archive, run_record
from harness.records.trial_record import RecordError
from harness.suites.suite import NAME


def named(results: Path, run: str) -> str:
    """Return the name of the suite that a run's suite file gives in its key ``seconds``.

    ``run`` is the id of a run of the suite whose results folder is ``results``.
    Returns an empty name if the suite file has no such key, or a value that is no name of a suite.  The name is also
    empty if the run's file is missing or damaged, or does not hold the suite file.
    """
    try:
        suite = run_record.read(results, run).suite
        name = tomllib.loads(suite.text).get("seconds", "") if suite is not None else ""
    except (RecordError, ValueError):
        return ""
    return name if isinstance(name, str) and re.fullmatch(NAME, name) else ""


def beside(results: Path, suite: str) -> Path | None:
    """Return the path of the records of ``suite``, which are looked for next to ``results``, another suite's folder.

    The path is that of the suite's results folder or, if this folder has no records, of the suite's archive.
    Returns None if there is neither.
    """
    folder = results.absolute().parent / suite
    packed = folder.with_name(f"{suite}{archive.SUFFIX}")
    return folder if any(folder.glob("*.json")) else packed if packed.is_file() else None


def files(results: Path) -> list[Path]:
    """Return the files with the records of all suites that the runs of a results folder name in ``seconds``.

    These are JSON files of results folders, or archives, in sorted order.
    """
    runs = sorted((results / run_record.RUNS).glob("*.json"))
    places = {beside(results, name) for run in runs if (name := named(results, run.stem))}
    return sorted(
        path
        for place in places
        if place is not None
        for path in (place.glob("*.json") if place.is_dir() else [place])
    )

"""Finds the records that a suite's key ``seconds`` names, beside the suite's own.  Imports no pandas."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from harness.records import archive, run_record
from harness.records.trial_record import RecordError
from harness.suites.suite import NAME


def named(results: Path, run: str) -> str:
    """Return the name of the suite that the suite file of a run gives in its key ``seconds``.

    The name is empty if the suite file has no such key or a wrong one, or if the run's file is missing or damaged.
    """
    try:
        suite = run_record.read(results, run).suite
        name = tomllib.loads(suite.text).get("seconds", "") if suite is not None else ""
    except (RecordError, ValueError):
        return ""
    return name if isinstance(name, str) and re.fullmatch(NAME, name) else ""


def beside(results: Path, suite: str) -> Path | None:
    """Return where the records of suite ``suite`` are, in the folder that also holds the results folder ``results``.

    This is the suite's own results folder or, if that has no records, the suite's archive; None without an archive.
    """
    folder = results.absolute().parent / suite
    packed = folder.with_name(f"{suite}{archive.SUFFIX}")
    return folder if any(folder.glob("*.json")) else packed if packed.is_file() else None


def files(results: Path) -> list[Path]:
    """Return the sorted record files and archives of all suites that runs of a results folder name in ``seconds``."""
    runs = sorted((results / run_record.RUNS).glob("*.json"))
    places = {beside(results, name) for run in runs if (name := named(results, run.stem))}
    return sorted(
        path
        for place in places
        if place is not None
        for path in (place.glob("*.json") if place.is_dir() else [place])
    )

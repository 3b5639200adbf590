"""Finds the records that a suite's key ``seconds`` names, beside the suite's own.  Imports no pandas."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from harness.records import archive, run_record
from harness.records.trial_record import RecordError
from harness.suites.suite import NAME


def named(results: Path, run: str) -> str:
    """Return the suite that the suite file of a run names in its key ``seconds``.

    The name is empty if there is none, or if the run's file is missing or damaged.
    """
    try:
        suite = run_record.read(results, run).suite
        name = tomllib.loads(suite.text).get("seconds", "") if suite is not None else ""
    except (RecordError, ValueError):
        return ""
    return name if isinstance(name, str) and re.fullmatch(NAME, name) else ""


def beside(results: Path, suite: str) -> Path | None:
    """Return the results folder of another suite beside a results folder, or its archive; None without records."""
    folder = results.absolute().parent / suite
    packed = folder.with_name(f"{suite}{archive.SUFFIX}")
    return folder if any(folder.glob("*.json")) else packed if packed.is_file() else None


def files(results: Path) -> list[Path]:
    """Return all files of the records that any run of a results folder names, sorted."""
    runs = sorted((results / run_record.RUNS).glob("*.json"))
    places = {beside(results, name) for run in runs if (name := named(results, run.stem))}
    return sorted(
        path
        for place in places
        if place is not None
        for path in (place.glob("*.json") if place.is_dir() else [place])
    )

"""Finds the records of another suite, which a suite file names with its key ``seconds``.

Such a suite file says that the other suite's records have the seconds of a step.  Reports compute net speed-ups (how
many times as fast a configuration reaches a loss) from these seconds.  This module imports no pandas.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from harness.records import archive, run_record
from harness.records.trial_record import RecordError
from harness.suites.suite import NAME


def named(results: Path, run: str) -> str:
    """Return the name of another suite: the value of the key ``seconds`` in the suite file of a run.

    ``results`` is a results folder, and ``run`` the id of a run that wrote records into it.  The name is empty in each
    of these cases:

    * The suite file has no such key, or its value cannot be the name of a suite.
    * The run's file is missing or damaged, or does not hold the suite file.
    """
    try:
        suite = run_record.read(results, run).suite
        name = tomllib.loads(suite.text).get("seconds", "") if suite is not None else ""
    except (RecordError, ValueError):
        return ""
    return name if isinstance(name, str) and re.fullmatch(NAME, name) else ""


def beside(results: Path, suite: str) -> Path | None:
    """Return the path of the records of ``suite``: its results folder or, if that has no records, its archive.

    ``results`` is the results folder of another suite.  The folder and the archive of ``suite`` are looked for in the
    parent folder of ``results``.  Returns None if there are no records and no archive.
    """
    folder = results.absolute().parent / suite
    packed = folder.with_name(f"{suite}{archive.SUFFIX}")
    return folder if any(folder.glob("*.json")) else packed if packed.is_file() else None


def files(results: Path) -> list[Path]:
    """Return the files that hold the records of the suites named with the key ``seconds``, in sorted order.

    All runs that wrote records into the folder ``results`` are considered; each may name a suite in its suite file.
    The files are the records (``*.json``) in a named suite's results folder or, if there are none, its archive.
    """
    runs = sorted((results / run_record.RUNS).glob("*.json"))
    places = {beside(results, name) for run in runs if (name := named(results, run.stem))}
    return sorted(
        path
        for place in places
        if place is not None
        for path in (place.glob("*.json") if place.is_dir() else [place])
    )

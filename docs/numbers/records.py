"""Finds the committed records of a suite, and among them the trials and pairs of a configuration in a setting."""

from __future__ import annotations

import tempfile
import tomllib
from pathlib import Path
from typing import Final

import pandas as pd

from docs.numbers.estimate import DocumentError
from harness.records import archive
from report.data import speedups
from report.data.frames import load
from report.data.metrics import Derived, derive
from report.data.text import parts_of
from report.effects.step_seconds import read_source

ROOT: Final = Path(__file__).resolve().parents[2]
REFERENCE: Final = Path("results/reference")

_DERIVED: Final[dict[str, Derived]] = {}  # by suite


def derived(suite: str) -> Derived:
    """Return the tables that are derived from the committed records of a suite, which are read only once.

    Raises:
        DocumentError: If there is no archive of that name.
        RecordError: If a record was edited, or the file is no archive.
    """
    if suite not in _DERIVED:
        if not (ROOT / REFERENCE / f"{suite}{archive.SUFFIX}").exists():
            raise DocumentError(f"no suite {suite!r} in {REFERENCE}: expected one of {', '.join(suites())}")
        _DERIVED[suite] = read(suite)
    return _DERIVED[suite]


def read(suite: str, folder: Path = REFERENCE) -> Derived:
    """Return the tables that are derived from a suite's archive in a folder below the root.

    Seconds of steps also come from the archive that the suite file names in its key ``seconds``.

    Raises:
        RecordError: If a record was edited, or the file is no archive.
    """
    with tempfile.TemporaryDirectory() as name:
        frames = load(archive.unpack(ROOT / folder / f"{suite}{archive.SUFFIX}", Path(name)))
    file = ROOT / "suites" / f"{suite}.toml"
    named = str(tomllib.loads(file.read_text(encoding="utf-8")).get("seconds", "")) if file.exists() else ""
    packed = ROOT / folder / f"{named}{archive.SUFFIX}"
    return derive(frames, (read_source(packed),) if named and packed.exists() else ())


def keep(suite: str, records: Derived) -> None:
    """Store what another process derived from a suite's records, for :func:`derived` to return."""
    _DERIVED[suite] = records


def suites(folder: Path = REFERENCE) -> list[str]:
    """Return the names of the suites that have committed records in a folder below the root, sorted."""
    return sorted(
        path.name.removesuffix(archive.SUFFIX) for path in (ROOT / folder).glob(f"*{archive.SUFFIX}")
    )


def in_setting(table: pd.DataFrame, at: str) -> pd.DataFrame:
    """Return the rows of a table whose settings have all parts of ``at``, such as ``2x2 ranks, 25 Mbit/s``.

    Settings are in the column ``where``.
    """
    parts = {part for part in parts_of(at) if part}
    matches = {where: parts <= {*str(where).split(", ")} for where in table["where"].unique()}
    return table[table["where"].map(matches).astype(bool)]


def trials_of(suite: str, name: str, at: str, table: pd.DataFrame | None = None) -> pd.DataFrame:
    """Return the rows of one configuration in one setting.

    They are rows of ``table``, by default the trials, with columns ``where``, ``configuration`` and ``setting``.
    """
    table = derived(suite).trials if table is None else table
    here = in_setting(table, at)
    if name not in set(here["configuration"]):
        present = "; ".join(map(str, table["configuration"].unique()))
        raise DocumentError(f"{suite}: no configuration {name!r} at {at!r}: expected one of {present}")
    rows = here[here["configuration"] == name]
    if len(set(rows["setting"])) > 1:
        settings = "; ".join(map(str, rows["where"].unique()))
        raise DocumentError(
            f"{suite}: {name!r} at {at!r} matches several settings: add to `at` what only one has of {settings}"
        )
    return rows


def paired(suite: str, name: str, over: str, at: str) -> tuple[pd.DataFrame, str]:
    """Return the pairs of a configuration and ``over``, by default the suite's baseline, and the name of ``over``."""
    trials = derived(suite).trials
    setting = str(trials_of(suite, name, at)["setting"].iloc[0])
    if over:
        both = trials[trials["setting"].eq(setting) & trials["configuration"].isin([name, over])]
        pairs = speedups.pairs(both, both["configuration"].eq(over))
    else:
        pairs = derived(suite).pairs
    pairs = pairs[pairs["setting"].eq(setting) & pairs["configuration"].eq(name)]
    if pairs.empty:
        raise DocumentError(
            f"{suite}: no trial of {name!r} has a pair of {over or 'the baseline'!r} at {at!r}: name another setting"
        )
    return pairs, str(pairs["baseline_configuration"].iloc[0])

"""Figures and tables from records; ``load`` gives them as a table, for figures and sums of one's own.

Never imports torch or cupy.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pandas as pd

from harness.records import archive
from report.data import frames, metrics

__all__ = ["load"]


def load(where: str | Path) -> pd.DataFrame:
    """Every trial that trained, one row each, with its metrics: those of :func:`report.data.metrics.trials`.

    Times in s, sizes in B, per optimizer step (``report/quantities.csv``).  Column ``trial`` is the trial's
    canonical form, ``losses`` its validations (``step``, ``loss``, ``train_seconds``, ``inter_bytes``).
    ``where`` is a suite's results folder, an archive of one (``.tar.xz``), or a folder of either.

    Raises a ReportError or RecordError if nothing is there, a folder mixes pools, or a file is no record.
    """
    path = Path(where)
    if not path.exists():
        raise frames.ReportError(f"{path}: no such folder or archive")
    archives = [path] if path.is_file() else sorted(path.glob(f"*{archive.SUFFIX}"))
    folders = [one for one in (path, *sorted(path.glob("*"))) if any(one.glob("*.json"))]
    if path in folders:
        archives, folders = [], [path]
    known = {one.name.removesuffix(archive.SUFFIX) for one in archives}
    with tempfile.TemporaryDirectory() as there:
        parts = [_of_folder(archive.unpack(one, Path(there))) for one in archives]
    parts += [_of_folder(one) for one in folders if one.name not in known]
    if not parts:
        raise frames.ReportError(f"{path}: no records and no archives; `zeropp run SUITE` writes them")
    return pd.concat(parts, ignore_index=True)


def _of_folder(path: Path) -> pd.DataFrame:
    found = frames.load(path)
    table, curves = metrics.trials(found), found.validations.set_index("id")
    return table.assign(
        trial=table["id"].map(lambda one: found.trial_of[one].canonical()),
        losses=table["id"].map(lambda one: curves[curves.index == one].to_dict("records")),
    )

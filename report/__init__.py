"""Draws figures and tables from records; ``load`` returns the records as a table, for your own analyses.

Never imports torch or cupy.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # pandas takes as long as the whole command line, which imports this package
    import pandas as pd

__all__ = ["load"]


def load(where: str | Path) -> pd.DataFrame:
    """Load records, and return a table with one row for each finished trial that trained.

    The columns are the metrics of :func:`report.data.metrics.trials` and two more: ``trial`` holds the trial's
    definition in its canonical form, and ``losses`` the list of the trial's validations, each a dict with ``step``,
    ``loss``, ``train_seconds`` and ``inter_bytes``.  Times are in s and sizes in B, both per optimizer step
    (``report/quantities.csv``).

    Args:
        where: One of three places: a suite's results folder; an archive of such a folder (``.tar.xz``); or a folder
            with several results folders or archives.  If this folder has a results folder and an archive of the same
            name, only the archive is read.

    Raises:
        ReportError: If ``where`` does not exist or holds no records, or if the records of one results folder cannot be
            compared with one another (:func:`report.data.frames.load`).
        RecordError: If a JSON file in a results folder is not a record of this schema.
    """
    import pandas as pd

    from harness.records import archive
    from harness.whole_file import is_hidden
    from report.data import frames

    path = Path(where)
    if not path.exists():
        raise frames.ReportError(
            f"{path}: there is no such folder or archive; name a suite's results folder or archive, or a folder "
            "with several of them"
        )
    archives = [path] if path.is_file() else sorted(path.glob(f"*{archive.SUFFIX}"))
    folders = [path, *(folder for folder in sorted(path.glob("*")) if not is_hidden(folder))]
    folders = [folder for folder in folders if any(folder.glob("*.json"))]
    if path in folders:
        archives, folders = [], [path]
    suites = {packed.name.removesuffix(archive.SUFFIX) for packed in archives}
    with tempfile.TemporaryDirectory() as unpacked:
        parts = [_of_folder(archive.unpack(packed, Path(unpacked))) for packed in archives]
    parts += [_of_folder(folder) for folder in folders if folder.name not in suites]
    if not parts:
        raise frames.ReportError(
            f"{path}: there are no records and no archives; run a suite with `zeropp run SUITE`, which writes records"
        )
    return pd.concat(parts, ignore_index=True)


def _of_folder(path: Path) -> pd.DataFrame:
    from report.data import frames, metrics

    records = frames.load(path)
    table, curves = metrics.trials(records), records.validations.set_index("id")
    return table.assign(
        trial=table["id"].map(lambda identity: records.trial_of[identity].canonical()),
        losses=table["id"].map(lambda identity: curves[curves.index == identity].to_dict("records")),
    )

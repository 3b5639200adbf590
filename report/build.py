"""Builds the report of a results folder: ``report.html``, with ``figures/`` and ``tables/`` beside it.

It is written into a hidden folder inside, then renamed file by file, so that a full disk or an interruption
leaves the previous report.
"""

from __future__ import annotations

import io
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import pandas as pd

from report import page, stamp
from report.data.frames import ReportError, load
from report.data.metrics import Derived, derive, records_of
from report.draw import theme
from report.draw.figure import style_of
from report.figures import all_figures
from report.stamp import PAGE
from report.tables import all_tables as tables
from report.tables import latex
from report.tables.table import Table, find_table
from report.verdicts import verdicts

_FOLDERS: Final = ("figures", "tables")
_LINK: Final = re.compile(rf'href="((?:{"|".join(_FOLDERS)})/[\w-]+\.[a-z]+)"')


def build(
    results: Path,
    *,
    columns: Mapping[str, Sequence[str]] | None = None,
    width: float = theme.WIDTH,
    forms: Sequence[str] = (),
) -> Path:
    """Build the report of a results folder, inside it; equal records give equal bytes.  Returns the page's path.

    ``columns``, by table, are printed beside the configuration, by title or name in the CSV; ``width`` is in mm.
    Figures are drawn as SVG, which the page shows, and in these further ``forms`` ("pdf", "png"), each of
    which takes about as long as the page.
    Raises a Refusal for an unknown column, and as :func:`report.data.frames.load` and :func:`publish`.
    """
    usual = not columns and width == theme.WIDTH and not forms
    made_of = stamp.digest(results) if usual else ""
    derived = derive(load(results))
    shown = with_columns(every_table(derived), columns or {})

    def page_of(folder: Path) -> str:
        style, figures = style_of(derived, width), folder / "figures"
        drawn = [figure.draw(derived, figures, style, forms) for figure in all_figures.FIGURES]
        macros = latex.numbers(shown, derived)
        (folder / "tables" / "numbers.tex").write_text(macros, encoding="utf-8", newline="\n")
        return page.render(derived, list(filter(None, drawn)), shown)

    path = publish(results, shown, page_of)
    if usual:
        stamp.write(results, made_of, verdicts(derived).lines)
    else:  # a run would draw another page
        stamp.remove(results)
    return path


def every_table(derived: Derived) -> list[Table]:
    """The table of verdicts, if anything is compared, and all others that have rows."""
    head = verdicts(derived).table
    return [*([head] if len(head.data) else []), *tables.all_tables(derived)]


def with_columns(shown: Sequence[Table], columns: Mapping[str, Sequence[str]]) -> list[Table]:
    """Tables with only the requested columns, in that order, after places and configuration."""
    tables = {table.name: table for table in shown}
    for name, requested in columns.items():
        table = find_table(shown, name)
        kept = [column for column in table.columns if column.place or column.key == "configuration"]
        kept += [table.column(title) for title in requested]
        tables[name] = replace(table, columns=tuple(dict.fromkeys(kept)))
    return list(tables.values())


def explanation(folder: Path, table: str, row: str, column: str) -> str:
    """What is behind one number of a page: its records, its raw values and its definition.

    The table is named, the row by parts of its cells (:meth:`Table.row`), the column by its title.  A Refusal names
    what there is.
    """
    derived = derive(load(folder))
    shown = find_table(every_table(derived), table)
    number, printed = shown.row(row), shown.column(column)
    cells = shown.rows()[number]
    ids = records_of(derived, shown.data.iloc[number])
    pairs = derived.pairs[derived.pairs["id"].isin(ids)]
    baselines = sorted({str(identity) for identity in pairs["baseline"]} - set(ids))
    cell = cells[shown.columns.index(printed)]
    lines = [f"{shown.title}, {' | '.join(cells[: shown.places + 1])}, {printed.title}: {cell}"]
    raw_values = pd.read_csv(io.StringIO(shown.csv())).iloc[number]  # with the ends of intervals
    lines += [f"  {key} = {value}" for key, value in raw_values.items() if str(key).startswith(printed.name)]
    files, others = (" ".join(f"{identity}.json" for identity in group) for group in (ids, baselines))
    lines.append(f"records ({len(ids)}): {files or 'none of one configuration alone'}")
    if baselines:
        lines.append(f"compared with ({len(baselines)}): {others}")
    how = printed.says or shown.caption or "a value of the trials' records, as it is"
    lines += [f"definition: {how}", *([f"notes: {shown.footnotes}"] if shown.footnotes else [])]
    return "\n".join([*lines, "quantities: docs/reference/metrics.md"])


def publish(results: Path, shown: Sequence[Table], page_of: Callable[[Path], str]) -> Path:
    """Write tables and the page that ``page_of`` makes with its files in a folder; returns the page's path.

    Raises a ReportError if the folder cannot be written, and then leaves the previous report.
    """
    try:
        with tempfile.TemporaryDirectory(dir=results, prefix=".report-") as name:
            staging = Path(name)
            for folder in _FOLDERS:
                (staging / folder).mkdir()
            for table in shown:
                latex.write(table, staging / "tables")
            (staging / PAGE).write_text(page_of(staging), encoding="utf-8", newline="\n")
            for path in (path for path in staging.rglob("*") if path.is_file()):
                with path.open("rb") as file:  # on the disk before it is renamed
                    os.fsync(file.fileno())
            _swap_in(staging, results)
    except OSError as error:
        raise ReportError(f"{results}: cannot write the report: {error.strerror or error}") from error
    return results / PAGE


def _swap_in(staging: Path, results: Path) -> None:
    """Rename new files over old ones, the page last, then remove files to which only the old page linked."""
    page, fresh = results / PAGE, set[str]()
    linked = set(_LINK.findall(page.read_text("utf-8", "replace"))) if page.is_file() else set()
    for folder in _FOLDERS:
        (results / folder).mkdir(exist_ok=True)
        for path in sorted((staging / folder).iterdir()):
            path.replace(results / folder / path.name)
            fresh.add(f"{folder}/{path.name}")
    (staging / PAGE).replace(page)
    for stale in linked - fresh:
        (results / stale).unlink(missing_ok=True)

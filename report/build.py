"""Builds the report of a results folder, inside this folder: ``report.html``, ``figures/`` and ``tables/``.

A new report is first written into a hidden folder inside the results folder.  So the previous report stays if the disk
is full or the writing is interrupted.  Then the new files are renamed one by one, and replace those of the previous
report.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import pandas as pd

from harness.whole_file import temporary_folder
from report import page, stamp
from report.data.frames import ReportError
from report.data.metrics import Derived, records_of
from report.draw import theme
from report.draw.figure import style_of
from report.effects.step_seconds import StepsFrom, derive_folder
from report.figures import all_figures
from report.stamp import PAGE
from report.tables import all_tables as tables
from report.tables import latex
from report.tables.table import Column, Table, find_table
from report.verdicts import verdicts

_FOLDERS: Final = ("figures", "tables")
_LINK: Final = re.compile(rf'href="((?:{"|".join(_FOLDERS)})/[\w-]+\.[a-z]+)"')


def build(
    results: Path,
    *,
    columns: Mapping[str, Sequence[str]] | None = None,
    width: float = theme.WIDTH,
    forms: Sequence[str] = (),
    steps: StepsFrom | None = None,
) -> Path:
    """Build the report of a results folder, inside this folder, and return the page's path.

    Equal records give a report that is equal to the byte.

    Args:
        results: The results folder.
        columns: For each named table, the columns that it prints after the columns for setting and configuration.  A
            column is given by its title or by its name in the CSV.  Tables that are not named print all their columns.
        width: Width of the figures in mm.
        forms: Formats in which figures are drawn besides SVG: "pdf", "png".  Each format takes about as long as the
            page.
        steps: Where net speed-ups take the seconds of a step from: other records, or a machine file.  A net speed-up is
            the factor by which a configuration needs fewer seconds of training than its baseline to reach the
            baseline's final loss.  By default, the seconds are taken from the records of another suite, if the suite
            file names one by its key ``seconds``.

    Raises:
        Refusal: If a table or column is unknown, or the machine file cannot be read.
        ReportError: If the records or ``steps`` cannot be used (:func:`report.effects.step_seconds.derive_folder`), or
            the folder cannot be written.
    """
    usual = not columns and width == theme.WIDTH and not forms and steps is None
    made_of = stamp.digest(results) if usual else ""
    derived = derive_folder(results, steps)
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
    else:  # `zeropp run` must not take a page with other options for its own
        stamp.remove(results)
    return path


def every_table(derived: Derived) -> list[Table]:
    """Return the table of verdicts, if configurations are compared, and all other tables that have rows."""
    head = verdicts(derived).table
    return [*([head] if len(head.data) else []), *tables.all_tables(derived)]


def with_columns(shown: Sequence[Table], columns: Mapping[str, Sequence[str]]) -> list[Table]:
    """Return the tables ``shown``, some of them with fewer columns.

    ``columns`` maps the name of a table to the columns that it keeps, each given by its title or by its name in the
    CSV.  The table shows these columns in this order.  The columns for setting and configuration are always kept, and
    come first.  A table that ``columns`` does not name keeps all its columns.
    Raises a Refusal if a table or a column is unknown.
    """
    tables = {table.name: table for table in shown}
    for name, requested in columns.items():
        table = find_table(shown, name)
        kept = [column for column in table.columns if column.place or column.key == "configuration"]
        kept += [table.column(title) for title in requested]
        tables[name] = replace(table, columns=tuple(dict.fromkeys(kept)))
    return list(tables.values())


def explanation(folder: Path, table: str, row: str, column: str, steps: StepsFrom | None = None) -> str:
    """Return a text that explains one number of a page: its records, its raw values and its definition.

    ``table`` is the table's name, ``row`` is text from the row's cells (:meth:`Table.row`), and ``column`` is the
    column's title.  ``steps`` are other sources of the seconds of a step, as for :func:`build`.
    Raises a Refusal if the table, row or column is unknown; the message lists the tables, rows or columns that exist.
    """
    derived = derive_folder(folder, steps)
    shown = find_table(every_table(derived), table)
    number, printed = shown.row(row), shown.column(column)
    cells = shown.rows()[number]
    ids = records_of(derived, shown.data.iloc[number])
    pairs = derived.pairs[derived.pairs["id"].isin(ids)]
    baselines = sorted({str(identity) for identity in pairs["baseline"]} - set(ids))
    cell = cells[shown.columns.index(printed)]
    lines = [f"{shown.title}, {' | '.join(cells[: shown.places + 1])}, {printed.title}: {cell}"]
    raw_values = pd.read_csv(io.StringIO(shown.csv())).iloc[number]  # with the ends of intervals
    lines += [f"  {key} = {value}" for key, value in raw_values.items() if _is_of(str(key), printed, shown)]
    files, others = (" ".join(f"{identity}.json" for identity in group) for group in (ids, baselines))
    lines.append(
        f"records ({len(ids)}): {files or 'none, because the row is not about a single configuration'}"
    )
    if baselines:
        lines.append(f"compared with ({len(baselines)}): {others}")
    how = printed.says or shown.caption or "a value of the trials' records, unchanged"
    lines += [f"definition: {how}", *([f"notes: {shown.footnotes}"] if shown.footnotes else [])]
    return "\n".join([*lines, "quantities: docs/reference/metrics.md"])


def _is_of(key: str, printed: Column, table: Table) -> bool:
    """Return whether the value in column ``key`` of a table's CSV is part of the column ``printed`` on the page.

    For example, ``speedup_low``, the low end of an interval, is part of the printed column ``speedup``.  But if the
    table also prints ``speedup_generate``, this is a column of its own, and no part of ``speedup``.
    """
    begin = [name for name in (column.name for column in table.columns) if f"{key}_".startswith(f"{name}_")]
    return max(begin, key=len, default="") == printed.name


def publish(results: Path, shown: Sequence[Table], page_of: Callable[[Path], str]) -> Path:
    """Write tables, the page and the page's other files into a results folder, and return the page's path.

    ``page_of`` gets a folder, writes the page's other files into it, and returns the page as HTML.
    Raises a ReportError if the results folder cannot be written, or holds something else where the report belongs; the
    previous report is then still there.
    """
    _check_places(results)
    try:
        with temporary_folder(results) as staging:
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
        raise ReportError(
            f"{results}: cannot write the report ({error.strerror or error}); free space on the disk, or make the "
            "folder writable"
        ) from error
    return results / PAGE


def _check_places(results: Path) -> None:
    """Raise a ReportError if ``report.html`` is a folder, or if ``figures`` or ``tables`` exists and is no folder."""
    for path in (results / folder for folder in _FOLDERS):
        if (path.exists() or path.is_symlink()) and not path.is_dir():
            raise ReportError(
                f"{path}: this is no folder, but the report writes its files there; move it away"
            )
    if (results / PAGE).is_dir():
        raise ReportError(f"{results / PAGE}: this is a folder, but the page has this name; move it away")


def _swap_in(staging: Path, results: Path) -> None:
    """Move the new report from ``staging`` into ``results``, where it replaces the previous report.

    Each file is renamed, the page last, and replaces the old file of the same name.  Then the function removes the
    figures and tables to which the old page linked and which the new report does not have.
    """
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

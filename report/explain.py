"""Says what is behind one number of a report: the records, and how it is computed."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pandas as pd

from harness.errors import Refusal, suggestion
from report.data.frames import load
from report.data.metrics import derive, records_of
from report.tables import registry
from report.tables.table import Table

_MOST_NAMED: Final = 12  # rows in a message


def explained(folder: Path, table: str, row: str, column: str) -> str:
    """Lines on one cell.

    Args:
        folder: of the records.
        table: its name, as that of its files.
        row: words that stand in one row's cells alone, with commas between them.
        column: the title of a printed column, or the name of one of the CSV's.

    Raises:
        Refusal: if there is no such cell, naming those there are.
    """
    derived = derive(load(folder))
    there = {one.name: one for one in registry.all_tables(derived)}
    if (shown := there.get(table)) is None:
        raise Refusal(f"no table {table!r}: expected one of {', '.join(there)}{suggestion(table, there)}")
    named = sum(one.place for one in shown.columns) + 1
    number = _row(shown, [part.strip() for part in row.split(",")], named)
    raw, cells = shown.data.iloc[number], shown.rows()[number]
    name, key, told = _column(shown, column, raw, cells)
    ids = records_of(derived, raw)
    pairs = derived.pairs[derived.pairs["id"].isin(ids)]
    beside = sorted({str(one) for one in pairs["baseline"]} - set(ids))
    lines = [f"{shown.title}, {' | '.join(cells[:named])}, {name}: {told}"]
    raw_values = pd.read_csv(io.StringIO(shown.csv())).iloc[number]  # with the ends of intervals
    lines += [f"  {of} = {value}" for of, value in raw_values.items() if str(of).startswith(key)]
    files = " ".join(f"{one}.json" for one in ids) or "none of one contender alone"
    lines.append(f"records ({len(ids)}): {files}")
    if beside:
        lines.append(f"compared with ({len(beside)}): " + " ".join(f"{one}.json" for one in beside))
    return "\n".join([*lines, f"how: {shown.caption}", "quantities: docs/reference/metrics.md"])


def _row(table: Table, parts: Sequence[str], named: int) -> int:
    """Number of the one row with all parts: as cells of their own or, if there is none, inside of cells."""
    rows = table.rows()
    whole = [number for number, cells in enumerate(rows) if set(parts) <= set(cells)]
    inside = [n for n, cells in enumerate(rows) if all(any(part in cell for cell in cells) for part in parts)]
    found = whole or inside
    if len(found) == 1:
        return found[0]
    names = list(dict.fromkeys(", ".join(cells[:named]) for cells in rows))
    more = f"; and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    raise Refusal(
        f"{len(found)} rows of {table.name} hold {', '.join(parts)!r}: expected words of one of "
        f"{'; '.join(names[:_MOST_NAMED])}{more}"
    )


def _column(table: Table, asked: str, raw: pd.Series, cells: Sequence[str]) -> tuple[str, str, str]:
    """(title, name in the CSV, printed value) of a column."""
    for column, cell in zip(table.columns, cells, strict=True):
        if asked in (column.title, column.key, column.name):
            return column.title, column.name, cell
    if asked in raw.index:
        return asked, asked, str(raw[asked])
    there = [column.title for column in table.columns if column.title]
    raise Refusal(f"no column {asked!r} in {table.name}: expected one of {'; '.join(there)}, or of its CSV")

"""Says what is behind one number of a report: the records, and how it is computed."""

from __future__ import annotations

import io
from pathlib import Path

import pandas as pd

from report.data.frames import load
from report.data.metrics import derive, records_of
from report.tables import all_tables
from report.tables.table import named


def explained(folder: Path, table: str, row: str, column: str) -> str:
    """Lines on a cell: a table by name, a row by words of its cells, a column by title or name; a Refusal
    names those there are.
    """
    derived = derive(load(folder))
    shown = named(all_tables.all_tables(derived), table)
    number, printed = shown.row(row), shown.column(column)
    cells = shown.rows()[number]
    ids = records_of(derived, shown.data.iloc[number])
    pairs = derived.pairs[derived.pairs["id"].isin(ids)]
    beside = sorted({str(one) for one in pairs["baseline"]} - set(ids))
    told = cells[shown.columns.index(printed)]
    lines = [f"{shown.title}, {' | '.join(cells[: shown.places + 1])}, {printed.title}: {told}"]
    raw_values = pd.read_csv(io.StringIO(shown.csv())).iloc[number]  # with the ends of intervals
    lines += [f"  {of} = {value}" for of, value in raw_values.items() if str(of).startswith(printed.name)]
    files = " ".join(f"{one}.json" for one in ids) or "none of one contender alone"
    lines.append(f"records ({len(ids)}): {files}")
    if beside:
        lines.append(f"compared with ({len(beside)}): " + " ".join(f"{one}.json" for one in beside))
    return "\n".join([*lines, f"how: {shown.caption}", "quantities: docs/reference/metrics.md"])

"""Registry of all tables of the report, in page order; and the explanation of one of their numbers."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Final

import pandas as pd

from report.data import caveats
from report.data.frames import load
from report.data.metrics import Derived, derive, records_of
from report.tables.break_even import break_even, generation, parity
from report.tables.bytes_and_memory import checks, memory, volume
from report.tables.errors import chosen_codecs, largest_error, losses, quantisation, sent_error
from report.tables.peers import peers
from report.tables.phases import phases
from report.tables.provenance import energy, environment, failures, links, setting
from report.tables.summary import summary, time
from report.tables.table import Table, find_table

MAKERS: Final[dict[str, Callable[[Derived], Table]]] = {
    maker.__name__: maker
    for maker in (
        summary, peers, time, energy, losses, failures, generation, phases, volume, checks, parity,
        break_even, memory, sent_error, chosen_codecs, quantisation, largest_error, links, setting,
        environment,
    )
}  # fmt: skip


def all_tables(derived: Derived, names: Collection[str] = tuple(MAKERS)) -> list[Table]:
    """Tables of these names that have rows, in page order."""
    note = caveats.modelled_in_words(derived)
    tables = [maker(derived) for name, maker in MAKERS.items() if name in names]
    return [replace(table, caption=table.caption + note) for table in tables if not table.data.empty]


def explanation(folder: Path, table: str, row: str, column: str) -> str:
    """Records and formula of a cell: table by name, row by parts of cells, column by title; or a Refusal."""
    derived = derive(load(folder))
    shown = find_table(all_tables(derived), table)
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
    return "\n".join([*lines, f"how: {shown.caption}", "quantities: docs/reference/metrics.md"])

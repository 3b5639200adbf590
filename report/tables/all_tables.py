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
    shown = [table for table in tables if not table.data.empty]
    return [replace(table, footnotes=(table.footnotes + note).strip()) for table in shown]


def explanation(folder: Path, table: str, row: str, column: str) -> str:
    """What is behind one number of a page: its records, its raw values and its definition.

    The table is named, the row by parts of its cells (:meth:`Table.row`), the column by its title.  A Refusal names
    what there is.
    """
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
    how = printed.says or shown.caption or "a value of the trials' records, as it is"
    lines += [f"definition: {how}", *([f"notes: {shown.footnotes}"] if shown.footnotes else [])]
    return "\n".join([*lines, "quantities: docs/reference/metrics.md"])

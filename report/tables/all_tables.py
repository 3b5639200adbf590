"""Lists all tables of a page except the table of verdicts, in page order."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Final

from report.data import caveats
from report.data.metrics import Derived
from report.tables.break_even import break_even, generation, parity
from report.tables.bytes_and_memory import checks, memory, volume
from report.tables.errors import chosen_codecs, largest_error, losses, lossless, quantisation, sent_error
from report.tables.net_speed import net_speedup
from report.tables.peers import peers
from report.tables.phases import phases
from report.tables.provenance import energy, environment, failures, links, setting
from report.tables.summary import summary, time
from report.tables.table import Table

MAKERS: Final[dict[str, Callable[[Derived], Table]]] = {
    maker.__name__: maker
    for maker in (
        summary, peers, time, energy, losses, net_speedup, failures, generation, phases, volume, checks, parity,
        break_even, memory, sent_error, chosen_codecs, quantisation, largest_error, lossless, links,
        setting,
        environment,
    )
}  # fmt: skip


def all_tables(derived: Derived, names: Collection[str] = tuple(MAKERS)) -> list[Table]:
    """Return the tables that have rows, in page order: those of the given ``names``, by default all."""
    note = caveats.modelled_in_words(derived)
    tables = [maker(derived) for name, maker in MAKERS.items() if name in names]
    shown = [table for table in tables if not table.data.empty]
    return [replace(table, footnotes=(table.footnotes + note).strip()) for table in shown]

"""Registry of all tables of the report, in page order."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Final

from report.data import footnotes
from report.data.metrics import Derived
from report.tables.energy import energy
from report.tables.errors import largest_error, quantisation, sent_error
from report.tables.generation import generation
from report.tables.learning import losses
from report.tables.memory import memory
from report.tables.peers import peers
from report.tables.provenance import environment, failures, links, published_throughput, setting
from report.tables.rates import break_even, parity
from report.tables.summary import summary, time
from report.tables.table import Table
from report.tables.volume import checks, volume


def all_tables(derived: Derived) -> list[Table]:
    """All tables that have rows, in page order."""
    return some_tables(derived, NAMES_OF_FILES)


def some_tables(derived: Derived, names: Collection[str]) -> list[Table]:
    """Tables of these names that have rows, in page order."""
    note = footnotes.modelled_in_words(derived)
    made = [maker(derived) for name, maker in _MAKERS.items() if name in names]
    return [replace(table, caption=table.caption + note) for table in made if not table.data.empty]


_MAKERS: Final[dict[str, Callable[[Derived], Table]]] = {
    maker.__name__: maker
    for maker in (
        summary, peers, time, energy, losses, failures, generation, volume, checks, parity, break_even,
        memory, sent_error, quantisation, largest_error, links, published_throughput, setting, environment,
    )
}  # fmt: skip
NAMES_OF_FILES: Final = tuple(_MAKERS)


def maker_of(name: str) -> Callable[[Derived], Table]:
    """The function that makes the table of that name."""
    return _MAKERS[name]

"""Prints tables that fit the terminal, and names the columns that it left out.

A column with one value in all rows becomes a part of a line above the table; one of zeros and unknown values
alone is left out.  Headings break at dots and spaces only.  Columns that still do not fit are left out, the
least important first, and named below.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.filesize import pick_unit_and_suffix
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from harness.errors import visible
from harness.suites.labels import as_written, counted

PIPE_WIDTH: Final = 200  # columns where the output is no terminal
BYTES: Final = ".4g B"  # a form: in the unit that fits the column's largest
_WIDEST: Final = 40  # characters of a text's cell before it is folded


class _Console(Console):
    """A console that prints no control characters of records, manifests and suites."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Return the text that is printed, of every line and every cell of a table."""
        return super().render_str(visible(text), **options)


def console(*, stderr: bool = False) -> Console:
    """A console that does not cut tables when it is piped, unless COLUMNS limits their width."""
    plain, columns = _Console(stderr=stderr, highlight=False), os.environ.get("COLUMNS", "")
    if plain.width > 0 and (plain.is_terminal or columns.isdecimal()):
        return plain
    return _Console(stderr=stderr, highlight=False, width=PIPE_WIDTH)  # some set COLUMNS to 0: not known


@dataclass(frozen=True, slots=True)
class Column:
    """How one key of rows is printed; None is a dash."""

    key: str
    name: str = ""  # its heading, which may break at dots and spaces; by default the key
    form: str = ""  # of numbers, aligned to the right; empty for text
    unit: str = ""  # of all cells; stands in the heading
    rank: int = 0  # columns of rank 0 are never left out, those of the highest rank first
    mark: Callable[[Mapping[str, Any]], str] = lambda _: ""  # printed behind the number of a row
    always: bool = False  # whether it stays a column if all its values are equal
    whole: bool = False  # whether its cells are never folded, so that users can copy them
    cells: tuple[str, ...] = ()  # by row, from :func:`filled`

    @property
    def heading(self) -> str:
        """The name, and the unit behind a comma."""
        return f"{self.name}, {self.unit}" if self.unit else self.name


def filled(rows: Sequence[Mapping[str, Any]], columns: Sequence[Column]) -> Iterator[Column]:
    """The columns with their cells, and their names and units in full."""
    for column in columns:
        values = [row.get(column.key) for row in rows]
        form, unit = column.form, column.unit
        if form == BYTES:
            largest = int(max((value for value in values if value is not None), default=0))
            scale, prefix = pick_unit_and_suffix(largest, ["B", "kB", "MB", "GB", "TB"], 1000)
            values = [None if value is None else value / scale for value in values]
            form, unit = ".4g", f"{prefix}{unit}"
        cells = []
        for value, row in zip(values, rows, strict=True):
            text = as_written(column.key, value) if not form or value is None else format(value, form)
            cells.append(text + column.mark(row))
        yield replace(column, name=column.name or column.key, unit=unit, cells=tuple(cells))


def show(rows: Sequence[Mapping[str, Any]], columns: Sequence[Column], out: Console, *, whole: str) -> None:
    """Print rows as a table that fits; ``whole`` says where to get all columns."""
    known = [column for column in columns if column.always or any(row.get(column.key) for row in rows)]
    shown, same = list[Column](), list[str]()
    for column in filled(rows, known):
        if column.always or len(rows) == 1 or len(set(column.cells)) > 1:
            shown.append(column)
        else:
            same.append(f"{column.name} {column.cells[0]} {column.unit}".rstrip())
    if same:
        say(f"The same in all rows: {'; '.join(same)}.", out)
    left_out: list[Column] = []
    unbounded = out.options.update(width=10_000, max_width=10_000)
    while out.measure(table := _table(shown), options=unbounded).maximum > out.width:
        last = max(reversed(shown), key=lambda column: column.rank)
        if not last.rank:
            break  # folded
        shown.remove(last)
        left_out.insert(0, last)
    out.print(table)
    if left_out:
        names = ", ".join(column.name for column in left_out)
        say(f"{counted(len(left_out), 'column')} left out: {names}; {whole}.", out)


def say(line: str, out: Console) -> None:
    """Print a line unless it is empty, broken at words in a terminal; elsewhere it stays one line."""
    if line:
        out.print(line, markup=False, highlight=False, soft_wrap=out.width >= PIPE_WIDTH)


def _table(columns: Sequence[Column]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in columns:
        table.add_column(
            escape(re.sub(r"(?<=[.])(?! )| ", "\n", column.heading)),
            justify="right" if column.form else "left",
            no_wrap=column.whole,
            min_width=max(map(len, column.cells)) if column.whole else None,
            overflow="fold",
            max_width=None if column.form else max(_WIDEST, *map(len, column.name.split("."))),
        )
    for row in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*map(escape, row))
    return table

"""Prints tables that fit the width of the terminal.

A column that has the same value in all rows is moved into a line above the table.  A column whose values are all zero,
empty or unknown is dropped.  Neither is done to a column that must always be shown (:attr:`Column.always`).  If the
table is still too wide, the least important columns (those of the highest :attr:`Column.rank`) are left out, and a line
below the table names them.  Headings break at dots and spaces only.
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

PIPE_WIDTH: Final = 200  # columns where the output is not a terminal
BYTES: Final = ".4g B"  # form of a column of bytes, all in the unit that suits the largest of them
_WIDEST: Final = 40  # characters of a text cell, after which it is folded


class _Console(Console):
    """A console of rich that escapes control characters in the texts that it prints."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Return ``text`` as rich prints it, with control characters escaped; rich calls this for lines and cells."""
        return super().render_str(visible(text), **options)


def console(*, stderr: bool = False) -> Console:
    """Return a console as wide as the terminal.

    If the output is not a terminal, the console has :data:`PIPE_WIDTH` columns.  The environment variable COLUMNS sets
    the width in both cases.
    """
    plain, columns = _Console(stderr=stderr, highlight=False), os.environ.get("COLUMNS", "")
    # A width of 0 comes from terminals that set COLUMNS to 0 because they do not know it.
    if plain.width > 0 and (plain.is_terminal or columns.isdecimal()):
        return plain
    return _Console(stderr=stderr, highlight=False, width=PIPE_WIDTH)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a printed table: the key whose value it shows for each row, and the value's format.

    A value of None is printed as a dash.
    """

    key: str
    name: str = ""  # the heading, which may break at dots and spaces; by default the key
    form: str = ""  # format specification of numbers, which are aligned to the right; empty for text
    unit: str = ""  # unit of the numbers of all cells; printed in the heading
    rank: int = 0  # on a narrow terminal, columns of the highest rank are left out first; columns of rank 0 always stay
    # Returns, for a row, a text that is printed after the value.
    mark: Callable[[Mapping[str, Any]], str] = lambda _: ""
    always: bool = False  # whether the column is shown even if all its values are equal or empty
    whole: bool = False  # whether cells are never folded, so that users can copy them
    cells: tuple[str, ...] = ()  # the text of each row, set by :func:`filled`

    @property
    def heading(self) -> str:
        """The column's name and, after a comma, its unit; only the name if there is no unit."""
        return f"{self.name}, {self.unit}" if self.unit else self.name


def interval(low: float | None, high: float | None, form: str) -> str:
    """Return an interval as text that can follow a number in a cell: `` (0.12 to 0.15)``.

    ``form`` is the format specification of both ends, such as ``.2f``.  Returns an empty text if an end is None, or if
    both ends are equal.
    """
    return "" if low is None or high is None or low == high else f" ({low:{form}} to {high:{form}})"


def filled(rows: Sequence[Mapping[str, Any]], columns: Sequence[Column]) -> Iterator[Column]:
    """Format the cells of a table, and yield copies of the columns with their field ``cells`` set.

    A column without a name gets its key as name.  In a column of bytes, all values are scaled to one unit (B, kB, MB,
    GB or TB).  The column's own unit, such as ``/step``, follows this unit: ``MB/step``.
    """
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
    """Print rows as a table that fits the console.

    Args:
        rows: Values by key.
        columns: The columns to print, in order.
        out: Where to print.
        whole: Says where the reader finds all columns, such as ``calls.csv has all``.  If columns do not fit and are
            left out, this text is printed after the names of these columns.
    """
    known = [column for column in columns if column.always or any(row.get(column.key) for row in rows)]
    shown, same = list[Column](), list[str]()
    for column in filled(rows, known):
        if column.always or len(rows) == 1 or len(set(column.cells)) > 1:
            shown.append(column)
        else:
            same.append(f"{column.name}: {column.cells[0]} {column.unit}".rstrip())
    if same:
        say(f"The same in all rows: {'; '.join(same)}.", out)
    left_out: list[Column] = []
    unbounded = out.options.update(width=10_000, max_width=10_000)
    while out.measure(table := _table(shown), options=unbounded).maximum > out.width:
        last = max(reversed(shown), key=lambda column: column.rank)
        if not last.rank:
            break  # the remaining columns are needed, so their cells are folded
        shown.remove(last)
        left_out.insert(0, last)
    out.print(table)
    if left_out:
        names = ", ".join(column.name for column in left_out)
        say(f"{counted(len(left_out), 'column')} left out: {names}; {whole}.", out)


def say(line: str, out: Console) -> None:
    """Print a line of text; print nothing if the line is empty.

    On a console narrower than :data:`PIPE_WIDTH`, the line is broken between words.  Other consoles do not break it.
    """
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

"""Prints tables that fit the terminal, and says what it left out.

A column that holds one value in all rows becomes a part of a line above the table.  Headings break at dots
and spaces alone.  Columns that do not fit even so are left out, the least important first, and named below.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

PIPE_WIDTH: Final = 200  # columns where the output is no terminal
_WIDEST: Final = 40  # characters of a text's cell before it is folded
_UNITS: Final = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def console(*, stderr: bool = False) -> Console:
    """A console that does not cut tables when it is piped, unless COLUMNS says how wide they may be."""
    plain = Console(stderr=stderr, highlight=False)
    if plain.is_terminal or os.environ.get("COLUMNS", "").isdecimal():
        return plain
    return Console(stderr=stderr, highlight=False, width=PIPE_WIDTH)


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table."""

    name: str  # its heading, which may break at dots and spaces
    cells: Sequence[str]  # by row
    unit: str = ""  # of all cells; stands in the heading
    marks: Sequence[str] = ()  # what stands behind each cell; empty for nothing behind any
    number: bool = True  # whether it is aligned to the right, and never folded
    rank: int = 0  # importance; columns of rank 0 are never left out, those of the highest rank are first
    always: bool = False  # whether it is a column even where it holds one value
    whole: bool = False  # whether no cell is ever folded, since it is there to be copied

    @property
    def heading(self) -> str:
        """The name, and the unit behind a comma."""
        return f"{self.name}, {self.unit}" if self.unit else self.name

    @property
    def marked(self) -> list[str]:
        """The cells with their marks."""
        return [
            cell + mark for cell, mark in zip(self.cells, self.marks or [""] * len(self.cells), strict=True)
        ]

    @property
    def varies(self) -> bool:
        """Whether it tells rows apart."""
        return len(self.cells) < 2 or len(set(self.marked)) > 1

    @property
    def same(self) -> str:
        """What a column that does not vary says, in words."""
        return f"{self.name} {self.cells[0]} {self.unit}".rstrip() + "".join(self.marks[:1])


def text(name: str, cells: Sequence[str], *, rank: int = 0, always: bool = False) -> Column:
    """A column of words."""
    return Column(name, cells, number=False, rank=rank, always=always)


def sizes(
    name: str, values: Sequence[float | None], *, per: str = "", rank: int = 0, marks: Sequence[str] = ()
) -> Column:
    """A column of bytes in the unit that fits the largest, followed by marks; ``-`` for what is not known."""
    largest = max((value for value in values if value is not None), default=0.0)
    unit, scale = next(((unit, scale) for unit, scale in _UNITS if largest >= scale), ("B", 1.0))
    cells = ["-" if value is None else f"{value / scale:.4g}" for value in values]
    return Column(name, cells, f"{unit}{per}", marks, rank=rank)


def numbers(
    name: str,
    values: Iterable[float | str | None],
    form: str,
    unit: str = "",
    *,
    rank: int = 0,
    marks: Sequence[str] = (),
) -> Column:
    """A column of values in a format, followed by marks; ``-`` for what is not known."""
    cells = ["-" if value is None else format(value, form) for value in values]
    return Column(name, cells, unit, marks, rank=rank)


def show(columns: Sequence[Column], out: Console, *, whole: str) -> None:
    """Print columns as a table that fits; ``whole`` names where all of it is to be had."""
    shown = [column for column in columns if column.always or column.varies]
    same = [column for column in columns if column not in shown]
    if same:
        say(f"The same in all rows: {'; '.join(column.same for column in same)}.", out)
    left_out: list[Column] = []
    while not _fits(table := _table(shown), out) and not _fits(table := _table(shown, broken=True), out):
        last = max(range(len(shown)), key=lambda number: (shown[number].rank, number))
        if not shown[last].rank:
            table = _table(shown, broken=True, fold=True)
            break
        left_out.insert(0, shown.pop(last))
    out.print(table)
    if left_out:
        names = ", ".join(column.name for column in left_out)
        count = f"{len(left_out)} column{'s' if len(left_out) > 1 else ''}"
        say(f"{count} left out: {names}; {whole}.", out)


def say(line: str, out: Console) -> None:
    """Print a line, if it says anything, broken at words in a terminal; elsewhere it stays one line."""
    if line:
        out.print(line, markup=False, highlight=False, soft_wrap=out.width >= PIPE_WIDTH)


def _fits(table: Table, out: Console) -> bool:
    unbounded = out.options.update(width=10_000, max_width=10_000)
    return out.measure(table, options=unbounded).maximum <= out.width


def _table(columns: Sequence[Column], *, broken: bool = False, fold: bool = False) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in columns:
        table.add_column(
            escape(re.sub(r"(?<=[.])(?! )| ", "\n", column.heading) if broken else column.heading),
            justify="right" if column.number else "left",
            no_wrap=column.whole or (column.number and not fold),
            min_width=max(map(len, column.cells), default=0) if column.whole else None,
            overflow="fold",
            max_width=None if column.number else max(_WIDEST, *map(len, column.name.split("."))),
        )
    for row in zip(*(column.marked for column in columns), strict=True):
        table.add_row(*map(escape, row))
    return table

"""Prints a table in a terminal."""

from __future__ import annotations

import rich.table
from rich import box
from rich.console import Console
from rich.markup import escape

from report.tables.table import Table


def show(table: Table, out: Console) -> None:
    """Print a table, of each place one of its own, under its title."""
    columns, places = table.by_place()
    for place, rows in places:
        printed = rich.table.Table(
            box=box.SIMPLE_HEAD,
            title=escape(f"{table.title}: {place}" if place else table.title),
            title_justify="left",
            padding=(0, 1, 0, 0),
            pad_edge=False,
        )
        for column in columns:
            printed.add_column(column.title, justify="right" if column.numeric else "left", overflow="fold")
        for row in rows:
            printed.add_row(*(escape(cell) for cell in row))
        out.print(printed)

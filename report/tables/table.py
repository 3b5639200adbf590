"""A table and its output formats: CSV (raw values), Markdown, LaTeX, and rows for the page.

Text in records may hold anything; Markdown is escaped here, LaTeX in :mod:`report.tables.latex`, HTML by
the page's template.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import pandas as pd

from report.data.text import text
from report.tables import latex

_MARKDOWN: Final = re.compile(  # what GitHub's Markdown would take for markup
    r"""
    [`|$~]                                              # code, cells, formulas, what is struck out
    | \\(?=[!-/:-@\[-`{-~])                            # what escapes the next character
    | \*(?=\S) | (?<=\S)\*                             # emphasis: a star that touches a word
    | (?<![^\W_])_(?=\S) | (?<=\S)_(?![^\W_])          # and a line below that does not join two letters
    | (?<=[\])])\[ | \[(?=[^\]]*\](?:[(\[:]|$))        # links and what they lead to
    | ^[#+>*-](?=\s|\#) | (?<=^\d)[.)](?=\s)            # headings, lists, quotations
    | (?<!\w)@(?=\w) | (?<!\w):(?=[a-z][\w+-]*:)       # names of people and of little pictures
    | (?<=:)/(?=/) | (?<=www)\.                         # addresses
    """,
    re.VERBOSE,
)


@dataclass(frozen=True, slots=True)
class Column:
    """A printed column."""

    key: str  # of the data
    title: str
    format: Callable[[Any], str] = text  # of a value; numbers are right-aligned
    place: bool = False  # whether it says where the row ran, which following rows may share

    @property
    def names(self) -> tuple[str, ...]:
        """By which it can be asked for."""
        return self.title, self.key, self.key.removesuffix("_told")

    @property
    def numeric(self) -> bool:
        """Whether it is right-aligned."""
        return self.format is not text


@dataclass(frozen=True)
class Table:
    """One table."""

    name: str  # file name without suffix, and anchor on the page
    title: str
    caption: str
    data: pd.DataFrame  # raw values; all its columns go into the CSV
    columns: tuple[Column, ...]  # those that are printed, in order

    def rows(self) -> list[list[str]]:
        """Printed cells, row by row, not escaped."""
        return [
            [column.format(value) for column, value in zip(self.columns, row, strict=True)]
            for row in self.data[[column.key for column in self.columns]].astype(object).to_numpy()
        ]

    def by_place(self) -> tuple[tuple[Column, ...], list[tuple[str, list[list[str]]]]]:
        """Printed cells grouped by place, for media where a column of places is too wide.

        Returns:
            Columns, and rows under the place that they share; as they are, under no place, where no two rows
            that follow each other share one.
        """
        places = [number for number, column in enumerate(self.columns) if column.place]
        others = [number for number, column in enumerate(self.columns) if not column.place]
        rows = self.rows()
        found = [
            (told, [[row[number] for number in others] for row in mine])
            for told, mine in groupby(rows, lambda row: ", ".join(row[number] for number in places))
        ]
        if not places or len(found) == len(rows):
            return self.columns, [("", rows)]
        return tuple(self.columns[number] for number in others), found

    def csv(self) -> str:
        """Raw values as CSV."""
        told = [name for name in self.data.columns if str(name).endswith("_told")]
        return self.data.drop(columns=told).to_csv(index=False, lineterminator="\n")

    def markdown(self) -> str:
        """A GitHub-flavoured pipe table under its title."""
        return f"**{markdown(self.title)}.** {markdown(self.caption)}\n\n{self.markdown_rows()}"

    def markdown_rows(self) -> str:
        """The same without title and caption."""
        head = [markdown(column.title) for column in self.columns]
        rule = ["---:" if column.numeric else ":---" for column in self.columns]
        body = [[markdown(cell) for cell in row] for row in self.rows()]
        return "".join("| " + " | ".join(cells) + " |\n" for cells in (head, rule, *body))

    def latex(self) -> str:
        """A bare ``tabular`` in booktabs' rules."""
        return latex.tabular(self)

    def write(self, folder: Path) -> None:
        """Write all formats."""
        for suffix, written in {"csv": self.csv(), "md": self.markdown(), "tex": self.latex()}.items():
            (folder / f"{self.name}.{suffix}").write_text(written, encoding="utf-8", newline="\n")


def markdown(value: str) -> str:
    """Escape text for Markdown where Markdown would change it, HTML included; numbers and units stay."""
    escaped = _MARKDOWN.sub(r"\\\g<0>", text(value))
    escaped = re.sub(r"&(?=#?\w+;)", "&amp;", escaped)
    return escaped.replace("<", "&lt;").replace(">", "&gt;")


def placed(name: str, title: str, caption: str, rows: list[dict[str, Any]], *columns: Column) -> Table:
    """Build a table of rows with a ``where``: what all rows share moves into the caption."""
    data = pd.DataFrame(rows)
    told = pd.DataFrame([str(row["where"]).split(", ") for row in rows]).fillna("")
    common = [str(told[place].iloc[0]) for place in told.columns if len(told[place].unique()) == 1]
    if common:
        caption = f"{caption} All: {', '.join(common)}."
    places: list[Column] = []
    for place in told.columns:
        if len(told[place].unique()) > 1:
            data[f"where_{place}_told"] = told[place]
            places.append(Column(f"where_{place}_told", "Where" if not places else "", place=True))
    shown = [column for column in columns if column.key not in data or data[column.key].notna().any()]
    return Table(name, title, caption, data, (*places, *shown))

"""A table: raw values, columns that say what they are, and its forms as CSV, Markdown and rows of a page."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Final

import pandas as pd
import rich.table
from rich import box
from rich.console import Console, JustifyMethod
from rich.markup import escape

from harness.errors import Refusal, suggestion
from harness.records.confidence_intervals import CONFIDENCE, FEWEST, Interval
from report.data import caveats, published
from report.data.frames import groups
from report.data.metrics import OTHERS_WITHIN
from report.data.text import NOTHING, number, text, with_interval
from report.draw.names_of_rows import by_contender
from report.quantities import formula

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
_MOST_NAMED: Final = 12  # rows in a message
_PRINTED: Final = "_"  # begins the names of columns that are text for print, and not in the CSV


@dataclass(frozen=True, slots=True)
class Column:
    """A printed column."""

    key: str  # of the data, whose values are numbers, words or :class:`Interval`
    title: str  # with the unit
    form: Callable[[Any], str] = text  # of a value; numbers are right-aligned
    says: str = ""  # what it is, a sentence of the caption
    mark: str = ""  # key of the text that follows each value
    place: bool = False  # whether it says where the row ran, which following rows may share
    ends: bool = True  # whether those of an interval are printed

    @property
    def name(self) -> str:
        """By which it can be asked for, beside its title."""
        return self.key.removeprefix(_PRINTED)

    @property
    def numeric(self) -> bool:
        """Whether it is right-aligned."""
        return self.form is not text

    def cell(self, value: Any) -> str:
        """A value as printed."""
        if isinstance(value, Interval) and self.ends and value.known:
            return with_interval(value, self.form)
        estimate = value.estimate if isinstance(value, Interval) else value
        return NOTHING if isinstance(estimate, float) and math.isnan(estimate) else self.form(estimate)


@dataclass(frozen=True)
class Table:
    """One table; its name is that of its files and of its anchor on the page."""

    name: str
    title: str
    caption: str
    data: pd.DataFrame
    columns: tuple[Column, ...]

    @property
    def places(self) -> int:
        """How many columns, on the left, say where a row ran."""
        return sum(column.place for column in self.columns)

    def rows(self) -> list[list[str]]:
        """Printed cells, row by row, not escaped."""
        return [
            [one.cell(row[one.key]) + (str(row[one.mark]) if one.mark else "") for one in self.columns]
            for row in self.data.astype(object).to_dict("records")
        ]

    def by_place(self) -> tuple[tuple[Column, ...], list[tuple[str, list[list[str]]]]]:
        """Columns, and printed rows under the place that they share, for media where places' columns are too
        wide; as they are, under no place, where no two rows that follow each other share one.
        """
        places, rows = self.places, self.rows()
        found = [
            (told, [row[places:] for row in mine])
            for told, mine in groupby(rows, lambda row: ", ".join(row[:places]))
        ]
        if not places or len(found) == len(rows):
            return self.columns, [("", rows)]
        return self.columns[places:], found

    def column(self, asked: str) -> Column:
        """The printed column of this title or name; a Refusal names those there are."""
        if found := [one for one in self.columns if asked in (one.title, one.key, one.name)]:
            return found[0]
        titles = "; ".join(one.title for one in self.columns if one.title)
        raise Refusal(f"no column {asked!r} in {self.name}: expected one of {titles}")

    def row(self, words: str) -> int:
        """Number of the one row with words, parted by commas: as cells or, if none has them so, in cells."""
        rows, parts = self.rows(), [part.strip() for part in words.split(",")]
        found = [number for number, cells in enumerate(rows) if {*parts} <= {*cells}] or [
            number for number, cells in enumerate(rows) if all(part in "\n".join(cells) for part in parts)
        ]
        if len(found) == 1:
            return found[0]
        names = list(dict.fromkeys(", ".join(cells[: self.places + 1]) for cells in rows))
        more = f"; and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        raise Refusal(
            f"{len(found)} rows of {self.name} hold {', '.join(parts)!r}: expected words of one of "
            f"{'; '.join(names[:_MOST_NAMED])}{more}"
        )

    def csv(self) -> str:
        """Raw values as CSV; an interval in three columns."""
        found: dict[str, Any] = {}
        for key in (str(key) for key in self.data if not str(key).startswith(_PRINTED)):
            values = found[key] = self.data[key]
            if values.map(lambda value: isinstance(value, Interval)).any():
                for end, of in (("", "estimate"), ("_low", "low"), ("_high", "high")):
                    found[f"{key}{end}"] = [getattr(value, of, value) for value in values]
        return pd.DataFrame(found).to_csv(index=False, lineterminator="\n")

    def markdown(self) -> str:
        """A GitHub-flavoured pipe table under its title."""
        return f"**{markdown(self.title)}.** {markdown(self.caption)}\n\n{self.markdown_rows()}"

    def markdown_rows(self) -> str:
        """The same without title and caption; a place stands in the first of the rows that share it."""
        rows, places = self.rows(), self.places
        lines = [
            [markdown(column.title) for column in self.columns],
            ["---:" if column.numeric else ":---" for column in self.columns],
        ]
        for above, row in zip([[], *rows], rows, strict=False):
            shared = places if row[:places] == above[:places] else 0
            lines.append([*[""] * shared, *map(markdown, row[shared:])])
        return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)

    def show(self, out: Console) -> None:
        """Print it in a terminal, each place as a table of its own, under its title."""
        columns, places = self.by_place()
        for place, rows in places:
            title = escape(f"{self.title}: {place}" if place else self.title)
            printed = rich.table.Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
            printed.padding = (0, 1, 0, 0)
            for column in columns:
                side: JustifyMethod = "right" if column.numeric else "left"
                printed.add_column(column.title, justify=side, overflow="fold")
            for row in rows:
                printed.add_row(*map(escape, row))
            out.print(printed)


def find_table(tables: Sequence[Table], name: str) -> Table:
    """The table of a name; a Refusal names those there are."""
    there = {one.name: one for one in tables}
    if name not in there:
        raise Refusal(f"no table {name!r}: expected one of {', '.join(there)}{suggestion(name, there)}")
    return there[name]


def markdown(value: str) -> str:
    """Escape text for Markdown where Markdown would change it, HTML included; numbers and units stay."""
    escaped = _MARKDOWN.sub(r"\\\g<0>", text(value))
    escaped = re.sub(r"&(?=#?\w+;)", "&amp;", escaped)
    return escaped.replace("<", "&lt;").replace(">", "&gt;")


def table_of(
    name: str, title: str, rows: list[dict[str, Any]] | pd.DataFrame, *columns: Column, notes: str = ""
) -> Table:
    """A table of rows, without columns that have no value; of rows with a ``where``, what ours share moves
    into the caption, the rest into columns on the left.
    """
    data = pd.DataFrame(rows)
    shown = [one for one in columns if one.key in data and data[one.key].notna().any()]
    caption = [*(one.says for one in shown), notes]
    if any(getattr(value, "known", False) for one in shown if one.ends for value in data[one.key]):
        caption.append(f"In brackets: {CONFIDENCE:.0%} intervals, from {FEWEST} pairs or values on.")
    if "where" in data and len(data):
        told = data["where"].astype(str).str.split(", ", expand=True).fillna("").add_prefix("_where_")
        ours = told[data["where"].ne(published.PUBLISHED)]
        places = [str(place) for place in told if len(set(ours[place])) > 1]
        if common := [told[place].iloc[0] for place in told if place not in places]:
            caption.append(f"All: {', '.join(common)}.")
        data = data.join(told[places])
        heads = [Column(place, "Where" if place == places[0] else "", place=True) for place in places]
        shown = [*heads, *shown]
    found = Table(name, title, " ".join(part.strip() for part in caption if part.strip()), data, tuple(shown))
    numbers = (cell for row in found.rows() for one, cell in zip(shown, row, strict=True) if one.numeric)
    return replace(found, caption=found.caption + caveats.footnotes(numbers))


CONTENDER: Final = Column("contender", "Contender")
TRIALS: Final = Column("trials", "n", str, mark="_taken")
STEP: Final = Column("step_seconds", "Step, s", number(3), formula("step"), ends=False)
RATIO: Final = "{:.2f}".format


def rows_of(table: pd.DataFrame, *keys: str) -> Iterator[tuple[dict[str, Any], pd.DataFrame]]:
    """Of each contender at each place (by ``keys``, else its cell): the columns above, and its rows."""
    for _, here in groups(table, list(keys or ("cell",))):
        for contender, mine in by_contender(here):
            yield {"where": mine["where"].iloc[0], "contender": contender, **trial_count(mine)}, mine


def trial_count(mine: pd.DataFrame) -> dict[str, Any]:
    """The number of trials, with that of those during which others had the processors."""
    taken = int(mine["taken_share"].gt(OTHERS_WITHIN).sum())
    return {"trials": len(mine), "_taken": f" ({taken} {caveats.TAKEN})" if taken else ""}
